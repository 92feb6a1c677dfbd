"""The shorter form of tools/crash_test.py, with --faults, too, and what needs several processes besides."""

from __future__ import annotations

import pathlib
import random
import signal

import pytest
from crashes.faults import BUCKET, DISK, FAULTS, Plan, Torture, can_mount
from crashes.kills import PREEMPTED, Account, disturb
from crashes.runs import STEPS_PER_EPOCH, TOLERANCE, TOTAL_STEPS, Process, Run, Undisturbed, differences

pytestmark = pytest.mark.slow

NO_DROPOUT = "experiment.build_model.dropout = 0.0"  # whose masks are each replica's own
STEP_SECONDS = 0.02


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [("one_device", 3), ("mirrored", 3), ("multi_worker", 2), pytest.param("horovod", 2, marks=pytest.mark.horovod)],
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_was_not(
    tmp_path: pathlib.Path, undisturbed: Undisturbed, strategy: str, kills: int
) -> None:
    account, run = Account(strategy), Run(tmp_path / "run")
    disturb(run, account, random.Random(f"7 {strategy}"), most_kills=kills)
    assert not account.problems
    assert account.kills > 0 and account.most_steps_lost <= 1
    assert differences(run, undisturbed(strategy)) == []
    assert not run.is_writing  # nothing half-written is left


LEFT = [  # by strategy: at which step, by which signal, to whom
    ("multi_worker", 5, signal.SIGTERM, "one worker"),
    ("mirrored", 19, signal.SIGUSR1, "all"),
    ("multi_worker", 30, signal.SIGTERM, "all"),
]
LEFT_BY_HOROVOD = [("horovod", 2 * STEPS_PER_EPOCH - 1, signal.SIGTERM, "all")]


@pytest.mark.parametrize(
    ("lives", "last"), [(LEFT, "one_device"), pytest.param(LEFT_BY_HOROVOD, "mirrored", marks=pytest.mark.horovod)]
)
def test_runs_go_on_under_other_strategies_and_signals_cost_no_step(
    tmp_path: pathlib.Path, undisturbed: Undisturbed, lives: list[tuple[str, int, int, str]], last: str
) -> None:
    run = Run(tmp_path / "run")
    saved = 0
    for strategy, step, number, to_whom in lives:
        saved = leave(run, strategy, saved, at_step=step, number=number, to_one_worker=to_whom == "one worker")
    with Process(run, last, NO_DROPOUT) as process:
        assert process.wait() == 0, process.output
        assert [event["step"] for event in process.new_events("resumed")] == [saved]
    assert differences(run, undisturbed("one_device", NO_DROPOUT), tolerance=TOLERANCE) == []


def leave(run: Run, strategy: str, before: int, *, at_step: int, number: int, to_one_worker: bool) -> int:
    """Trains from step `before` on until it is told to leave; the step that it saved last, which is the last it did."""
    with Process(run, strategy, NO_DROPOUT, step_seconds=STEP_SECONDS) as process:
        process.until(lambda: run.newest_step >= at_step)
        if to_one_worker:
            process.workers()[1].send_signal(number)
        else:
            process.signal(number)
        assert process.wait() == PREEMPTED, process.output
        assert [event["step"] for event in process.new_events("resumed")] == ([before] if before else [])
        assert f"Left at step {run.newest_step:,} after saving" in process.output
    assert at_step <= run.newest_step == run.progress < TOTAL_STEPS
    return run.newest_step


# Faults


EVER = 300.0  # seconds
ON_A_DISK: list[Plan] = [{"disk": (0.0, EVER)}, {"kill": (2.0, 0.0)}, {"fork": (0.0, EVER)}]
IN_A_BUCKET: list[Plan] = [
    {"term": (2.0, 0.0)},
    {"503": (0.0, 3.0), "clock": (2.0, EVER), "slow": (4.0, 3.0), "silent": (7.0, 3.0)},
]


def test_faults_of_every_kind_leave_a_run_as_if_they_had_not_come(tmp_path: pathlib.Path) -> None:
    torture = Torture(tmp_path, random.Random(3), print)
    may_fill = can_mount(tmp_path)  # else training/test_leaving.py alone has a disk fill
    torture.disturb("train", DISK if may_fill else None, ON_A_DISK[0 if may_fill else 1 :])
    torture.disturb("train", BUCKET, IN_A_BUCKET)
    assert not torture.problems
    assert {"kill", "fork", "term", "503", "clock"} <= {fault for fault, _ in torture.counts} <= FAULTS.keys()
