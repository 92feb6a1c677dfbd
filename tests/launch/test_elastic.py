"""Runs whose hosts come and go, with real processes under both launchers; 127.0.0.2 has a remote shell."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import support
from crashes.runs import EXPERIMENT, Run, environment
from equivalence.runs import assert_close
from launch import gates, ranks
from launch.programs import both_launchers
from processes import Running

from tfdist.errors import EXIT_PREEMPTED, EXIT_USER_ERROR, UserError
from tfdist.launch import hosts
from tfdist.launch.hosts import HostList
from tfdist.launch.plan import Plan
from tfdist.launch.supervise.output import Output
from tfdist.launch.supervise.supervisor import WorkerSlots

TOLERANCE = 1e-5
HERE, THERE = "localhost", "127.0.0.2"
TRAINING = [
    f"--gin_file={EXPERIMENT}",
    "--gin_file=configs/strategies/auto.gin",
    f"--gin_file={pathlib.Path(__file__).with_name('elastic.gin')}",
    "--gin_param=experiment.build_model.dropout = 0.0",  # masks are each replica's own
]
# As ssh: another environment, and the command line through a shell. What is in UNREACHABLE does not answer.
REMOTE_SHELL = """#!/bin/sh
grep -qsx "$1" {directory}/unreachable && {{ echo "no route to $1" >&2; exit 255; }}
exec env -i PATH="$PATH" HOME="$HOME" {mark}="${mark}" sh -c "$2"
"""
PRELUDE = """
import os, pathlib, signal, sys, time
from launch.ranks import DIRECTORY, rank_and_size
here = pathlib.Path(os.environ[DIRECTORY])
rank, size = rank_and_size()
def mark(name):
    (here / f"{name}.{rank}.{size}").touch()
def wait_for(name, count=1):
    deadline = time.monotonic() + 60
    while len(list(here.glob(f"{name}.*"))) < count:
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
mark(f"start-{len(list(here.glob(f'start-*.{rank}.{size}'))) + 1}")
"""


class Elastic(Running):
    """A launcher with `hosts`, which may change. Its workers find `directory` in DIRECTORY."""

    def __init__(self, directory: pathlib.Path, launcher: str, *command: str, hosts: tuple[str, ...]) -> None:
        self.directory = directory
        self._hosts_file = directory / "hosts"
        self.set_hosts(*hosts)
        shell = directory / "remote_shell"
        shell.write_text(REMOTE_SHELL.format(directory=directory, mark=support.MARK))
        shell.chmod(0o755)
        options = [f"--hosts_command=cat {self._hosts_file}", f"--remote_shell={shell}", f"--launcher={launcher}"]
        paths = os.pathsep.join([str(directory), environment()["PYTHONPATH"]])
        super().__init__(
            [sys.executable, "-m", "tfdist.launch", *options, *command],
            directory / "output",
            {"PYTHONPATH": paths, ranks.DIRECTORY: str(directory)},
            support.REPOSITORY,
        )

    def set_hosts(self, *hosts: str) -> None:
        part = self._hosts_file.with_suffix(".part")
        part.write_text("".join(f"{host}\n" for host in hosts))
        part.rename(self._hosts_file)

    def marks(self, name: str) -> list[str]:
        """What a program has left of that name, of every rank and size."""
        return sorted(path.name for path in self.directory.glob(f"{name}.*"))

    def at_gate(self, step: int, size: int) -> list[int]:
        """The processes that wait before `step`, by rank, as soon as these are `size` workers."""
        files = [self.directory / f"{step}.{rank}.{size}" for rank in range(size)]
        self.until(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def open_gate(self, step: int) -> None:
        (self.directory / f"{step}.open").touch()

    def wait(self) -> int:
        """Its status, once nothing of it is left."""
        status = self.end()
        self.wait_until_all_gone(timeout=120.0)
        return status


@pytest.fixture
def open_elastic(tmp_path: pathlib.Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def start(launcher: str, *command: str, program: str = "", hosts: tuple[str, ...] = (HERE, THERE)) -> Elastic:
            if program:
                (tmp_path / "program.py").write_text(PRELUDE + program)
                command = (*command, "--backoff_seconds=0.1", "--module=program", "--", "x")
            return stack.enter_context(Elastic(tmp_path, launcher, *command, hosts=hosts))

        yield start


@pytest.mark.slow
@both_launchers
def test_workers_come_die_and_go_and_the_run_ends_as_if_nothing_was(
    tmp_path: pathlib.Path, open_elastic: Any, launcher: str
) -> None:
    run, reference = Run(tmp_path / "run"), Run(tmp_path / "reference")
    command = ("--max_restarts=3", "--", *TRAINING, f"--run_dir={run.directory}")
    elastic = open_elastic(launcher, *command, hosts=(HERE,))
    joins, dies, goes = gates.STEPS

    elastic.at_gate(joins, size=1)
    elastic.set_hosts(HERE, THERE)
    elastic.until(lambda: "The hosts have changed" in elastic.output)
    elastic.until(lambda: "SIGTERM was received" in elastic.output)
    elastic.open_gate(joins)

    workers = elastic.at_gate(dies, size=2)
    elastic.until(lambda: run.newest_step == dies)
    os.kill(workers[1], signal.SIGKILL)
    elastic.open_gate(dies)

    workers = elastic.at_gate(goes, size=2)
    elastic.until(lambda: run.newest_step == goes)
    os.kill(workers[1], signal.SIGTERM)  # its machine is taken away
    elastic.until(lambda: elastic.output.count("SIGTERM was received") == 2)
    elastic.open_gate(goes)

    assert elastic.wait() == 0, elastic.output
    started = [event["details"]["num_workers"] for event in run.events("training_started")]
    assert started == [1, 2, 2, 1], elastic.output
    joined, died, gone = [event["step"] for event in run.events("resumed")]
    assert joins < joined < dies and died == dies and gone > goes  # some steps later on a busy machine
    assert len(run.events("hosts_changed")) == 2
    assert [event["worker"] for event in run.events("worker_failed")] == [1]
    assert "Starting worker 0 on localhost, worker 1 on 127.0.0.2." in elastic.output

    support.run_python(
        ["-m", "tfdist.main", *TRAINING, f"--run_dir={reference.directory}"], env=environment(), cwd=support.REPOSITORY
    ).check()
    ours, theirs = run.weights(), reference.weights()
    assert ours.keys() == theirs.keys()
    assert_close(ours.values(), [theirs[name] for name in ours], tolerance=TOLERANCE)
    assert run.result()["examples_seen"] == reference.result()["examples_seen"] == 6 * 249


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_left_out_until_a_new_step(open_elastic: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "unreachable").write_text(f"{THERE}\n")
    program = """
if size == 1:
    sys.exit(0)
time.sleep(100)
"""
    elastic = open_elastic("tf_config", "--max_restarts=5", program=program)
    assert elastic.wait() == 0, elastic.output
    assert "worker 1 could not be started: the connection to 127.0.0.2 ended (status 255)" in elastic.output
    assert "no route to 127.0.0.2" in elastic.output and "without 127.0.0.2" in elastic.output


@pytest.mark.slow
def test_hosts_may_change_before_the_training_has_begun_and_be_too_few(open_elastic: Any) -> None:
    program = """
if size == 3:
    sys.exit(0)
time.sleep(100)  # it imports TensorFlow, say, and SIGTERM ends it
"""
    elastic = open_elastic("tf_config", "--min_workers=2", "--max_workers=3", program=program)
    elastic.until(lambda: len(elastic.marks("start-*")) == 2)
    elastic.set_hosts(HERE)
    elastic.until(lambda: "Waiting for hosts: 1 can be used, at least 2 are wanted." in elastic.output)
    elastic.set_hosts(f"{THERE}:2", f"{HERE}:2")
    assert elastic.wait() == 0, elastic.output
    assert "Starting worker 0 on localhost, worker 1 on 127.0.0.2, worker 2 on 127.0.0.2#2" in elastic.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [("tf_config", signal.SIGTERM), pytest.param("horovod", signal.SIGKILL, marks=pytest.mark.horovod)],
)
def test_nothing_is_left_when_the_launcher_ends(open_elastic: Any, launcher: str, number: int) -> None:
    program = """
def save(*_):
    time.sleep(0.5)
    mark("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
mark("ready")
while True:
    time.sleep(1)
"""
    elastic = open_elastic(launcher, program=program)
    elastic.until(lambda: len(elastic.marks("ready")) == 2)
    elastic.signal(number)
    assert elastic.wait() == (EXIT_PREEMPTED if number == signal.SIGTERM else -number)
    assert len(elastic.marks("saved")) == (2 if number == signal.SIGTERM else 0)


def test_hosts_that_stay_keep_their_places() -> None:
    listed = ["a", "b"]
    hosts = WorkerSlots(lambda: listed, min_workers=1, max_workers=3)
    assert hosts.take() == ("a", "b") and not hosts.have_changed()
    listed = ["c", "b", "b#2", "d"]
    assert hosts.have_changed() and hosts.take() == ("b", "b#2", "c")
    hosts.withdrawn.add("b")
    assert hosts.take() == ("b#2", "c", "d")
    listed = ["b", "e"]
    assert hosts.take() == ("b", "e")
    hosts.barred = frozenset({"b", "e"})
    assert hosts.take() == () and hosts.describe() == "0 can be used, at least 1 are wanted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("exit 3", "--hosts_command='exit 3' ended with status 3"),
        ("echo a b", "lists HOST or HOST:SLOTS, one a line; received 'a b'"),
        ("echo localhost; echo far", "lists localhost beside 'far'"),
        ("echo '# IPv6'; echo; echo ::1", "received '::1'"),
        ("echo :4", "received ':4'"),
        ("printf 'a\\t4'", "received 'a\\t4'"),
        ("echo a,b", "received 'a,b'"),
    ],
)
def test_hosts_that_cannot_be_used_are_one_message_and_status_2(hosts: str, expected: str) -> None:
    done = support.run_python(["-m", "tfdist.launch", f"--hosts_command={hosts}", "--", "x"], cwd=support.REPOSITORY)
    assert done.status == EXIT_USER_ERROR and expected in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("shell", ["no-such-shell -q", "'", ""])
def test_a_remote_shell_that_is_not_there_is_one_message(shell: str) -> None:
    plan = Plan(num_workers=1, first_index=0, command=("x",), environment={}, slots=("elsewhere.invalid",))
    with pytest.raises(UserError, match=r"--remote_shell is .* no such program"), contextlib.ExitStack() as started:
        started.enter_context(hosts.start(plan, Output(), remote_shell=shell))


def test_a_listing_goes_on_after_an_error_is_killed_whole_where_it_hangs_and_ends_with_the_launcher(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "ASK_SECONDS", 0.05)
    pid, reports = tmp_path / "pid", collections.deque[str]()
    command = f"echo a; cd {tmp_path}; [ ! -e hangs ] || sh -c 'echo $$ > new && mv new pid; exec sleep 301' | cat"
    listing = HostList(command, reports.append, ())
    assert listing.slots == ["a"]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        support.wait_until(lambda: bool(reports), seconds=60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "Too many open files" in reports.popleft()
    (tmp_path / "hangs").touch()
    support.wait_until(pid.exists, seconds=60)
    first = int(pid.read_text())
    assert os.getsid(first) != os.getsid(0)  # a Ctrl-C is not for it
    monkeypatch.setattr(hosts, "ANSWER_SECONDS", 0.0)
    support.wait_until(lambda: support.is_gone(first) and bool(reports), seconds=60)
    assert reports[0].endswith("did not end within 0 s. The hosts stay as they are.")
    monkeypatch.setattr(hosts, "ANSWER_SECONDS", 60.0)
    support.wait_until(lambda: not support.is_gone(int(pid.read_text())), seconds=60)
    listing.close()
    support.wait_until(lambda: support.is_gone(int(pid.read_text())), seconds=60)
    assert HostList(command, reports.append, [signal.SIGINT]).slots == []


def test_an_elastic_horovodrun_is_refused_with_what_to_write() -> None:
    done = support.run_python(["-m", "tfdist.main", *TRAINING], env={"HOROVOD_ELASTIC": "1"}, cwd=support.REPOSITORY)
    assert done.status == EXIT_USER_ERROR and "--launcher=horovod --hosts_command=./hosts.sh" in done.stderr
