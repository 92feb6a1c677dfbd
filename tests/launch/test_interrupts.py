"""Ctrl-C and SIGHUP to the launcher at every moment of its life: the first one saves, the second one kills."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from launch.programs import SHOWING, Run, assert_gone

from tfdist.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED

SAVES = """
def save(*_):
    signal.signal(signal.SIGTERM, lambda *_: mark(f"twice{index}"))
    mark(f"saving{index}")
    wait_for("may_end")
    print("saved", flush=True)
    sys.exit(143)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
signal.signal(signal.SIGINT, lambda *_: mark(f"sigint{index}"))
mark(f"ready{index}")
while True:
    time.sleep(1)
"""


def end(run: Run, *expected: int) -> list[str]:
    """The run's lines on stderr; there is no traceback among them, and the status is one of these."""
    status, _, stderr = run.finish()
    assert status in expected, (status, stderr)
    assert not [line for line in stderr if "Traceback" in line or "KeyboardInterrupt" in line], stderr
    return stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_reaches_the_workers_once_which_may_take_their_time(launch: Callable[..., Run], number: int) -> None:
    expected = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED
    run = launch(SAVES)
    run.wait_for("ready0", "ready1")
    os.killpg(run.pid, number)  # as a terminal does, to all of the process group
    if number == signal.SIGINT:  # timeout(1) signals its child, too
        run.signal(number)
    run.wait_for("saving0", "saving1")
    (run.directory / "may_end").touch()
    end(run, expected)
    assert sorted(run.output.splitlines()) == ["[worker 0] saved", "[worker 1] saved"]
    assert not [*run.directory.glob("twice*"), *run.directory.glob("sigint*")]


@pytest.mark.slow
def test_the_second_ctrl_c_kills_and_a_second_hangup_does_not(launch: Callable[..., Run]) -> None:
    run = launch(SAVES)
    run.wait_for("ready0", "ready1")
    run.signal(signal.SIGHUP)
    run.wait_for("saving0", "saving1")
    run.signal(signal.SIGHUP)
    run.wait_for("twice0", "twice1")
    run.signal(signal.SIGINT)
    stderr = end(run, 128 + signal.SIGKILL)
    assert "[launch] Killing the workers." in stderr
    assert_gone(run.read_pid("pid0"))


def test_a_hangup_that_nohup_keeps_away_stays_away(launch: Callable[..., Run]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = launch("mark(f'ready{index}'); wait_for('may_end')")
    finally:
        signal.signal(signal.SIGHUP, before)
    run.wait_for("ready0", "ready1")
    run.signal(signal.SIGHUP)
    (run.directory / "may_end").touch()
    assert "Passing" not in "".join(end(run, EXIT_DONE))


STARTING = ("tfdist.command_line", "tfdist.launch.ray_workers", "tfdist.launch.supervise.supervisor")


@pytest.mark.parametrize("module", STARTING)
def test_while_the_launcher_starts(launch: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # Python then says what it has imported
    run = launch("time.sleep(100)")
    run.until(lambda: f" {module}\n" in run.stderr)
    run.signal(signal.SIGINT)
    stderr = end(run, EXIT_INTERRUPTED)
    assert any("SIGINT was received" in line for line in stderr)


@pytest.mark.parametrize(
    ("program", "workers", "moment"),
    [
        pytest.param("time.sleep(100)", 4, lambda run: psutil.Process(run.pid).children(), marks=pytest.mark.slow),
        ('while True: print("a line of some length " * 20)', 2, lambda run: "[worker 1]" in run.output),
    ],
    ids=["while the workers start", "while it prints"],
)
def test_while_workers_run(
    launch: Callable[..., Run], program: str, workers: int, moment: Callable[[Run], Any]
) -> None:
    run = launch(program, options=("--max_restarts=3",), workers=workers)
    run.until(lambda: moment(run))
    run.signal(signal.SIGINT)
    assert not any("Starting again" in line for line in end(run, EXIT_INTERRUPTED))


@pytest.mark.slow
def test_between_a_failure_and_the_next_start(launch: Callable[..., Run]) -> None:
    program = """
run_dir.mkdir(exist_ok=True)
print("failing", start, file=sys.stderr)
sys.exit(9)
"""
    for moment in ("failing 2", "ended with status 9", "after the failure (restart 2)"):
        options = ("--max_restarts=9", "--backoff_seconds=0.2")
        run = launch(SHOWING + program, options=options, workers=1)
        run.until(lambda moment=moment, run=run: moment in run.stderr)
        run.signal(signal.SIGINT)
        end(run, EXIT_INTERRUPTED, *([9] if moment.startswith("failing") else []))  # it failed before it heard
        for mark in run.directory.glob("start0-*"):
            mark.unlink()


@pytest.mark.slow
def test_as_the_last_worker_ends(launch: Callable[..., Run]) -> None:
    for _ in range(5):
        run = launch("mark('done'); mark(f'gone{index}')", workers=1)
        pid = run.read_pid("pid0")
        while psutil.pid_exists(pid):
            time.sleep(0.0005)
        run.signal(signal.SIGINT)
        end(run, EXIT_DONE, EXIT_INTERRUPTED)
        for mark in run.directory.glob("pid*"):
            mark.unlink()


@pytest.mark.slow
def test_the_third_ctrl_c_ends_a_launcher_that_is_stuck(
    launch: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "heartbeat.add_exit_info(run_dir='gs://bucket/run'); mark('failed'); sys.exit(9)"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        run = launch(SHOWING + program, options=("--max_restarts=1",), workers=1)
        with silent.accept()[0]:  # the launcher asks the bucket, which says nothing
            while run.status is None:
                run.signal(signal.SIGINT)
                time.sleep(0.05)
    end(run, -signal.SIGINT)
