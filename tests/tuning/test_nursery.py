"""The process that forks trials: what it prepares is used, and what goes wrong with that costs no trial."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import support

SCRIPT = """\
import json
import os
import signal
import sys
import time

import psutil

from tfdist.tuning.nursery import Start, open_nursery

RUN_DIR = sys.argv[1]

def prepare(arguments):
    print("prepared with", *arguments, flush=True)
    if "raise" in arguments:
        raise ImportError("no such module")
    if "exit" in arguments:
        open(f"{RUN_DIR}/gone", "w").close()
        os._exit(7)

def run(arguments):
    print("ran with", *arguments, "by", os.getpid(), "as", os.environ.get("PLACE"), flush=True)
    return 3

def start(name, place, *arguments):
    return Start(name, arguments, f"{RUN_DIR}/{name}", {"PLACE": place}, place=place)

nursery = open_nursery(run, prepare)
server = psutil.Process(nursery._pid)
ends = {}

def wait_for(holds):
    deadline = time.monotonic() + 60
    while not holds():
        ends.update(nursery.ended())
        assert time.monotonic() < deadline
        time.sleep(0.01)

def children():
    return {child.pid for child in server.children() if child.status() != psutil.STATUS_ZOMBIE}

nursery.prepare(start("", "good", "base"))
wait_for(lambda: len(children()) == 1)
(spare,) = children()
nursery.start(start("first", "good", "values"))
wait_for(lambda: "first" in ends)
nursery.prepare(start("", "failing", "raise"))
nursery.start(start("second", "failing", "values"))
wait_for(lambda: "second" in ends)
nursery.prepare(start("", "gone", "exit"))
wait_for(lambda: os.path.exists(f"{RUN_DIR}/gone") and not children())
nursery.start(start("third", "gone", "values"))
wait_for(lambda: "third" in ends)
nursery.prepare(start("", "left", "base"))
wait_for(lambda: len(children()) == 1)
(left,) = children()
nursery.close()
print(json.dumps({"ends": ends, "spare": spare, "left_alive": psutil.pid_exists(left)}))
"""


def test_a_prepared_process_becomes_the_trial_and_none_is_lost_where_preparing_fails(
    tmp_path: pathlib.Path, run_python: Callable[..., support.Finished]
) -> None:
    finished = run_python(["-c", SCRIPT, tmp_path]).check()
    told = json.loads(finished.stdout.splitlines()[-1])
    assert told["ends"] == {"first": 3, "second": 3, "third": 3} and not told["left_alive"]
    first = (tmp_path / "first").read_text().splitlines()
    assert first == ["prepared with base", f"ran with values by {told['spare']} as good"]
    assert (tmp_path / "second").read_text().splitlines()[0] == "prepared with raise"
    assert "ran with values" in (tmp_path / "second").read_text()
    assert "ran with values" in (tmp_path / "third").read_text()
