"""Elastic Horovod with real processes: horovodrun, its workers and their trainings, on two names of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import support
from crashes.runs import EXPERIMENT, Run, environment
from launch import gates

from tfdist.launch.horovod.elastic_account import Account
from tfdist.launch.horovod.elastic_driver import Place
from tfdist.launch.horovod.elastic_round import Ending

pytestmark = pytest.mark.horovod

TOLERANCE = 1e-5
DEADLINE_SECONDS = 120.0
HOSTS = ("localhost", "127.0.0.1")
HOROVODRUN = pathlib.Path(__file__).with_name("horovodrun.py")
TRAINING = [
    f"--gin_file={EXPERIMENT}",
    "--gin_file=configs/strategies/auto.gin",
    f"--gin_file={pathlib.Path(__file__).with_name('elastic.gin')}",
    "--gin_param=experiment.build_model.dropout = 0.0",  # masks are each replica's own
]


# The worker's part of every program in place of tfdist.main: who it is, marks that it leaves, and waiting for others'.
PRELUDE = """
import os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["TFDIST_TEST_GATES"])
host = os.environ["HOROVOD_HOSTNAME"]
rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
def mark(name):
    (here / f"{name}.{host}").touch()
def wait_for(name, count=2):
    deadline = time.monotonic() + 60
    while len(list(here.glob(f"{name}.*"))) < count:
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
starts = len(list(here.glob(f"start-*.{host}"))) + 1
mark(f"start-{starts}")
"""


class Elastic:
    """An elastic horovodrun on `hosts`, which may change. Its workers find `directory` in DIRECTORY."""

    def __init__(self, directory: pathlib.Path, *command: str, hosts: tuple[str, ...]) -> None:
        self.directory = directory
        self._hosts_file = directory / "hosts"
        self.set_hosts(*hosts)
        script = directory / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {self._hosts_file}\n")
        script.chmod(0o755)
        elastic = ["-np", "1", "--min-np", "1", "--max-np", "2", "--host-discovery-script", script]
        horovodrun = [HOROVODRUN, *elastic, "--network-interface", "lo", "--gloo-timeout-seconds", "60"]
        self._mark = uuid.uuid4().hex
        own = {"PYTHONPATH": os.pathsep.join([str(directory), environment()["PYTHONPATH"]])}
        self._output = (directory / "output").open("w", errors="replace")
        self._popen = subprocess.Popen(
            [sys.executable, *map(str, horovodrun), sys.executable, "-m", *command],
            env=environment() | own | {support.MARK: self._mark, gates.DIRECTORY: str(directory)},
            cwd=support.REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def set_hosts(self, *hosts: str) -> None:
        part = self._hosts_file.with_suffix(".part")
        part.write_text("".join(f"{host}:1\n" for host in hosts))
        part.rename(self._hosts_file)

    def terminate(self) -> None:
        self._popen.terminate()

    def marks(self, name: str) -> list[str]:
        """What a program has left of that name, of every host."""
        return sorted(path.name for path in self.directory.glob(f"{name}.*"))

    def at_gate(self, step: int, size: int) -> dict[int, dict[str, Any]]:
        """Who waits before `step`, by rank, as soon as these are `size` workers."""
        found: dict[int, dict[str, Any]] = {}

        def are_there() -> bool:
            files = [self.directory / f"{step}.{host}" for host in HOSTS]
            read = [json.loads(file.read_text()) for file in files if file.exists()]
            found.update({each["rank"]: each for each in read if each["size"] == size})
            return len(found) == size

        self.wait_until(are_there)
        return found

    def open_gate(self, step: int) -> None:
        (self.directory / f"{step}.open").touch()

    def output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for what has to come while it runs."""
        try:
            support.wait_until(lambda: condition() or self._popen.poll() is not None, seconds=DEADLINE_SECONDS)
            assert condition()
        except AssertionError:
            pytest.fail(f"did not come\n{self.output()}", pytrace=False)

    def end(self) -> int:
        """Its status, once nothing of it is left."""
        self.wait_until(lambda: self._popen.poll() is not None)
        support.wait_until(lambda: not support.has_marked(self._mark), seconds=DEADLINE_SECONDS)
        return self._popen.returncode

    def close(self) -> None:
        support.kill_marked(self._mark)
        self._popen.wait()
        self._output.close()


@pytest.fixture
def open_elastic(tmp_path: pathlib.Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def start(*command: str, program: str = "", hosts: tuple[str, ...] = HOSTS) -> Elastic:
            if program:
                (tmp_path / "program.py").write_text(PRELUDE + program)
                command = ("tfdist.launch.horovod.elastic_worker", *command, "--module=program", "--", "x")
            elastic = Elastic(tmp_path, *command, hosts=hosts)
            stack.callback(elastic.close)
            return elastic

        yield start


@pytest.mark.slow
def test_workers_come_die_and_go_and_the_run_ends_as_if_nothing_was(tmp_path: pathlib.Path, open_elastic: Any) -> None:
    run, reference = Run(tmp_path / "run"), Run(tmp_path / "reference")
    elastic = open_elastic("tfdist.main", *TRAINING, f"--run_dir={run.directory}", hosts=HOSTS[:1])
    joins, dies, goes = gates.STEPS

    elastic.at_gate(joins, size=1)
    elastic.set_hosts(*HOSTS)
    elastic.wait_until(lambda: "the hosts have changed" in elastic.output())
    elastic.open_gate(joins)

    workers = elastic.at_gate(dies, size=2)
    elastic.wait_until(lambda: run.newest_step == dies)
    os.kill(workers[1]["child"], signal.SIGKILL)
    elastic.open_gate(dies)

    workers = elastic.at_gate(goes, size=2)
    elastic.wait_until(lambda: run.newest_step == goes)
    os.kill(workers[0]["worker"], signal.SIGKILL)  # the chief's, as if its host was lost
    elastic.open_gate(goes)

    assert elastic.end() == 0, elastic.output()
    started = [event["details"]["num_workers"] for event in run.events("run_started")]
    assert started == [1, 2, 2, 1], elastic.output()
    joined, *later = [event["step"] for event in run.events("resumed")]
    assert joins < joined < dies and later == [dies, goes]  # the step after the gate, or a later one on a busy machine
    assert [event["step"] for event in run.events("hosts_changed")] == [joined]
    failed = [(event["worker"], event["details"]["status"]) for event in run.events("worker_failed")]
    assert failed == [(1, 137)]  # who notes it for the chief was lost with it
    assert "worker 1 of 2 ended with status 137 (SIGKILL)" in elastic.output()
    assert "worker 1 of 2 is worker 0 of 1 now" in elastic.output()

    support.run_python(
        ["-m", "tfdist.main", *TRAINING, f"--run_dir={reference.directory}"], env=environment(), cwd=support.REPOSITORY
    ).check()
    ours, theirs = run.weights(), reference.weights()
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=0, atol=TOLERANCE, err_msg=name)
    assert run.result()["examples_seen"] == reference.result()["examples_seen"] == 6 * 249


@pytest.mark.slow
def test_a_status_that_would_be_so_again_ends_all_at_once(open_elastic: Any) -> None:
    program = """
wait_for("start-1")
if rank == 1:
    mark("misspelt")
    sys.exit(2)
wait_for("misspelt", 1)
sys.exit(4)  # it lost the other
"""
    elastic = open_elastic(program=program)
    assert elastic.end() == 1
    assert "ended with status 2, which would be so again: all end" in elastic.output()
    assert elastic.output().count("ended with status 2: all end") == 1
    assert len(elastic.marks("start-*")) == 2


@pytest.mark.slow
def test_what_fails_when_the_run_is_done_does_no_harm(open_elastic: Any) -> None:
    program = """
wait_for("start-1")
if rank == 1:
    wait_for("done", 1)
    time.sleep(0.5)
    os.abort()
mark("done")
"""
    elastic = open_elastic(program=program)
    assert elastic.end() == 0, elastic.output()
    assert "worker 1 of 2 ended with status 134 (SIGABRT), when the run was done already" in elastic.output()
    assert elastic.marks("start-2") == []


@pytest.mark.slow
def test_a_worker_that_fails_too_often_is_left_out_and_the_other_goes_on(open_elastic: Any) -> None:
    program = """
wait_for("start-1")
if size == 1:
    sys.exit(0)
if rank == 1:
    mark(f"failed-{starts}")
    sys.exit(1)
wait_for(f"failed-{starts}", 1)
sys.exit(4)
"""
    elastic = open_elastic("--max_failures=1", program=program)
    assert elastic.end() == 0, elastic.output()
    assert "ended with status 1 and is not started again: 2 failures within an hour" in elastic.output()
    assert len(elastic.marks("failed-*")) == 2
    assert len(elastic.marks("start-*")) == 2 + 3  # the other was there once more, and alone


@pytest.mark.slow
def test_a_process_that_does_not_notice_the_end_of_a_round_is_killed(open_elastic: Any) -> None:
    program = """
wait_for("start-1")
if starts == 2:
    sys.exit(0)
if rank == 1:
    sys.exit(4)
signal.signal(signal.SIGTERM, lambda *_: mark("heard"))
while True:
    time.sleep(1)
"""
    elastic = open_elastic("--end_seconds=1", program=program)
    assert elastic.end() == 0, elastic.output()
    assert len(elastic.marks("heard")) == 1
    assert "worker 0 of 2 ended with status 137 (SIGKILL)" in elastic.output()
    assert len(elastic.marks("start-2")) == 2


@pytest.mark.slow
def test_a_host_that_is_taken_away_is_left_also_before_the_training_has_begun(open_elastic: Any) -> None:
    program = """
if size == 1:
    sys.exit(0)
mark(f"rank{rank}")
time.sleep(100)  # it imports TensorFlow, say, and SIGTERM ends it
"""
    elastic = open_elastic(program=program)
    elastic.wait_until(lambda: len(elastic.marks("rank*")) == 2)
    (stays,) = (host for host in HOSTS if (elastic.directory / f"rank0.{host}").exists())
    elastic.set_hosts(stays)
    assert elastic.end() == 0, elastic.output()
    assert "has no worker any more; the run continues elsewhere" in elastic.output()
    assert elastic.marks("start-2") == [f"start-2.{stays}"]


@pytest.mark.slow
def test_when_one_workers_machine_is_taken_away_the_others_go_on(open_elastic: Any) -> None:
    program = """
if size == 1:
    sys.exit(0)
def leave(*_):
    mark("leaves")
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
if rank == 1:
    (here / "worker.part").write_text(str(os.getppid()))
    (here / "worker.part").rename(here / "worker")
wait_for("leaves", 1)
sys.exit(143)  # as all agree to
"""
    elastic = open_elastic(program=program)
    elastic.wait_until((elastic.directory / "worker").exists)
    os.kill(int((elastic.directory / "worker").read_text()), signal.SIGTERM)
    assert elastic.end() == 0, elastic.output()
    assert "Process 1 exit with status code 143" in elastic.output()
    assert len(elastic.marks("start-2")) == 1


@pytest.mark.slow
def test_when_horovodrun_is_told_to_end_the_workers_save_and_nothing_is_left(open_elastic: Any) -> None:
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
    elastic = open_elastic(program=program)
    elastic.wait_until(lambda: len(elastic.marks("ready")) == 2)
    elastic.terminate()
    assert elastic.end() == 1
    assert len(elastic.marks("saved")) == 2
    assert elastic.marks("start-2") == []


def test_failures_that_bring_no_new_step_are_enough_in_the_end() -> None:
    alone, two = Place(0, 1, 0, 1, 0, 1), Place(0, 2, 0, 1, 0, 2)

    def ended(status: int, step: int | None = None, **how: Any) -> Ending:
        known = {"was_told": False, "was_asked": False, "was_ended": False, "noted_no_signal": False}
        return Ending(status, **known | how, step=step)

    def account(place: Place, *endings: Ending, max_failures: int = 3) -> list[str | None]:
        rounds = Account(max_failures)
        return [rounds.enough(place, ending, now=10.0 * number) for number, ending in enumerate(endings)]

    lost, killed, left = ended(4), ended(137), ended(143, was_asked=True)
    assert account(two, lost, left, lost, lost) == [
        None,
        None,
        None,
        "3 failures in a row brought no new step (the last one is 0)",
    ]
    assert account(two, lost, lost, ended(4, 5), lost, lost, ended(4, 5))[-2:] == [
        None,
        "3 failures in a row brought no new step (the last one is 5)",
    ]
    assert account(two, killed, killed) == [None, "it failed 2 times in a row without a new step"]
    assert account(alone, killed, killed) == [None, None]
    assert account(two, *(ended(137, step) for step in (1, 2, 3, 4)))[-2:] == [
        None,
        "4 failures within an hour are more than --max_failures=3",
    ]
    assert account(two, ended(137, was_ended=True), ended(137, was_ended=True)) == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--", "x"], "is started by an elastic horovodrun, which sets HOROVOD_ELASTIC=1; received None"),
        (["--max_failures=3"], "The `--` and tfdist.main's arguments are missing"),
        (["--max_failure=3", "--", "x"], "flag 'max_failure'. Did you mean: max_failures ?"),
        (["--max_failures=-1", "--", "x"], "flag --max_failures=-1: -1 is not a non-negative integer"),
        (
            ["--peer_timeout_seconds=soon", "--", "x"],
            "flag --peer_timeout_seconds=soon: could not convert string to float",
        ),
    ],
)
def test_wrong_arguments_end_with_one_message_and_status_2(arguments: list[str], expected: str) -> None:
    done = support.run_python(
        ["-m", "tfdist.launch.horovod.elastic_worker", *arguments],
        env={"PYTHONPROFILEIMPORTTIME": "1"},
        cwd=support.REPOSITORY,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.status == 2 and len(said) == 1 and expected in said[0]
    assert "tensorflow" not in done.stderr and "keras" not in done.stderr
