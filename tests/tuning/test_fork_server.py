"""The process that forks trials: what it prepares is used, and what goes wrong with that costs no trial."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable

import pytest
import support

COMMON = """\
import json
import os
import sys
import time

import psutil

from tfdist.tuning.places.fork_server import open_fork_server
from tfdist.tuning.places.standby import Start

RUN_DIR = sys.argv[1]
CPUS = sorted(os.sched_getaffinity(0))

def prepare(arguments):
    print("prepared with", *arguments, flush=True)
    if "raise" in arguments:
        raise ImportError("no such module")
    if "exit" in arguments:
        open(f"{RUN_DIR}/gone", "w").close()
        os._exit(7)

def run(arguments, wait):
    print("built with", *arguments, "by", os.getpid(), flush=True)
    open(f"{RUN_DIR}/built-{arguments[0]}", "w").close()
    if "fail" in arguments:
        return 2
    wait()
    wait()
    cpus = os.sched_getaffinity(0)
    print("ran with", *arguments, "by", os.getpid(), "as", os.environ.get("PLACE"), "on", *cpus, flush=True)
    return 3

def start(name, place, *arguments, cpus=()):
    return Start(name, arguments, f"{RUN_DIR}/{name}", {"PLACE": place}, cpus=cpus, place=place)

fork_server = open_fork_server(run, prepare)
server = psutil.Process(fork_server._pid)
ends = {}

def wait_for(holds):
    deadline = time.monotonic() + 60
    while not holds():
        ends.update(fork_server.ended())
        assert time.monotonic() < deadline
        time.sleep(0.01)

def children():
    return {child.pid for child in server.children() if child.status() != psutil.STATUS_ZOMBIE}

"""
PREPARED = """\
fork_server.prepare(start("", "good", "base"))
wait_for(lambda: len(children()) == 1)
(standby,) = children()
fork_server.start(start("first", "good", "values"))
wait_for(lambda: "first" in ends)
fork_server.prepare(start("", "failing", "raise"))
fork_server.start(start("second", "failing", "values"))
wait_for(lambda: "second" in ends)
fork_server.prepare(start("", "gone", "exit"))
wait_for(lambda: os.path.exists(f"{RUN_DIR}/gone") and not children())
fork_server.start(start("third", "gone", "values"))
wait_for(lambda: "third" in ends)
fork_server.prepare(start("", "left", "base"))
wait_for(lambda: len(children()) == 1)
(left,) = children()
fork_server.close()
print(json.dumps({"ends": ends, "standby": standby, "left_alive": psutil.pid_exists(left)}))
"""
BUILT = """\
def end_of(name):
    wait_for(lambda: name in ends)
    return ends[name]

def is_built(name):
    return os.path.exists(f"{RUN_DIR}/built-{name}")

fork_server.prepare(start("", "a", "base"))
fork_server.start(start("early", "a", "early"))
end_of("early")
fork_server.prepare(start("", "a", "base"))
fork_server.prepare(start("", "b", "base"))
wait_for(lambda: len(children()) == 2)
standbys = children()
fork_server.build(start("next", "a", "next", cpus=CPUS[:1]))
wait_for(lambda: is_built("next"))
fork_server.start(start("other", "b", "other"))  # which is not built
end_of("other")
log_before = os.path.exists(f"{RUN_DIR}/next")
fork_server.start(start("next", "b", "next", cpus=CPUS[-1:]))
end_of("next")
fork_server.prepare(start("", "a", "base"))
fork_server.build(start("failing", "a", "failing", "fail"))
wait_for(lambda: is_built("failing"))
fork_server.start(start("failing", "a", "failing", "fail"))
end_of("failing")
fork_server.prepare(start("", "a", "base"))
fork_server.build(start("changed", "a", "changed", "old"))
wait_for(lambda: is_built("changed"))
fork_server.start(start("changed", "a", "changed", "new"))
end_of("changed")
fork_server.prepare(start("", "a", "base"))
fork_server.build(start("unwanted", "a", "unwanted"))
wait_for(lambda: is_built("unwanted"))
before = children()
fork_server.build(start("instead", "a", "instead"))  # which will be started next after all
wait_for(lambda: len(before - children()) == 1)
fork_server.prepare(start("", "a", "base"))
fork_server.build(start("left", "a", "left"))
wait_for(lambda: is_built("left"))
left = children()
fork_server.close()
print(json.dumps({"ends": ends, "standbys": [*standbys], "log_before": log_before,
                  "left_alive": any(map(psutil.pid_exists, left)), "num_left": len(left)}))
"""
UNBUILT = """\
fork_server.prepare(start("", "a", "base"))
fork_server.build(start("first", "a", "first", "old"))  # nobody knows yet what a trial takes
fork_server.prepare(start("", "b", "base"))
wait_for(lambda: len(children()) == 2)
standbys = children()
fork_server.start(start("first", "a", "first"))
wait_for(lambda: "first" in ends)
fork_server.build(start("second", "b", "second", "old"))  # by now that is known, and there is not so much memory
fork_server.start(start("second", "b", "second"))
wait_for(lambda: "second" in ends)
print(json.dumps({"ends": ends, "standbys": [*standbys]}))
"""


def test_a_prepared_process_becomes_the_trial_and_none_is_lost_where_preparing_fails(
    tmp_path: pathlib.Path, run_python: Callable[..., support.Finished]
) -> None:
    finished = run_python(["-c", COMMON + PREPARED, tmp_path]).check()
    told = json.loads(finished.stdout.splitlines()[-1])
    assert told["ends"] == {"first": 3, "second": 3, "third": 3} and not told["left_alive"]
    first = (tmp_path / "first").read_text().splitlines()
    assert first[0] == "prepared with base" and len(first) == 3
    assert first[2].startswith(f"ran with values by {told['standby']} as good on ")
    assert (tmp_path / "second").read_text().splitlines()[0] == "prepared with raise"
    assert "ran with values" in (tmp_path / "second").read_text()
    assert "ran with values" in (tmp_path / "third").read_text()


@pytest.mark.slow
def test_a_trial_is_built_ahead_and_begins_when_it_is_started(
    tmp_path: pathlib.Path, run_python: Callable[..., support.Finished]
) -> None:
    finished = run_python(["-c", COMMON + BUILT, tmp_path]).check()
    told = json.loads(finished.stdout.splitlines()[-1])
    assert told["ends"] == {"early": 3, "other": 3, "next": 3, "failing": 2, "changed": 3}
    assert told["num_left"] >= 1 and not told["left_alive"] and not told["log_before"]
    prepared, built, ran = (tmp_path / "next").read_text().splitlines()
    pid = int(built.rpartition(" ")[2])
    cpus = sorted(os.sched_getaffinity(0))
    assert pid in told["standbys"] and prepared == "prepared with base"
    assert ran == f"ran with next by {pid} as a on {cpus[-1]}"
    other = (tmp_path / "other").read_text()
    assert "ran with other" in other and str(pid) not in other
    assert (tmp_path / "failing").read_text().splitlines()[1].startswith("built with failing")
    changed = (tmp_path / "changed").read_text()
    assert "old" not in changed and "ran with changed new" in changed


@pytest.mark.slow
def test_nothing_is_built_ahead_where_memory_is_short(
    tmp_path: pathlib.Path, run_python: Callable[..., support.Finished]
) -> None:
    short = "import tfdist.tuning.places.fork_server as server\nserver.available_bytes = lambda: 1 << 20\n"
    finished = run_python(["-c", short + COMMON + UNBUILT, tmp_path]).check()
    told = json.loads(finished.stdout.splitlines()[-1])
    assert told["ends"] == {"first": 3, "second": 3}
    for name in told["ends"]:  # one that had built other values would have been ended
        log = (tmp_path / name).read_text()
        assert int(log.split("built with")[1].split("by ")[1].split()[0]) in told["standbys"]
