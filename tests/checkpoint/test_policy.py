"""The settings of `train.checkpoint`: what is refused, when checkpoints are made, and which of them stay where."""

from __future__ import annotations

import itertools
import pathlib
import time
from collections.abc import Sequence

import pytest
from checkpoint.checkpoints import Listener, new_manager, state_of, steps
from gcs.faults import Fault
from gcs.server import GcsServer

from tfdist.checkpoint import catalog
from tfdist.checkpoint.catalog import NO_MANIFEST, Entry, list_checkpoints
from tfdist.checkpoint.format.manifest import Manifest
from tfdist.checkpoint.policy import FIRST_SECONDS, LARGEST_SHARE, CheckpointPolicy, CheckpointSchedule
from tfdist.errors import UserError


def test_a_metric_whose_name_tells_no_direction_needs_one() -> None:
    with pytest.raises(UserError, match=r"Set policy.CheckpointPolicy.best_mode to 'min' or 'max'\."):
        _ = CheckpointPolicy(keep_best="val_score").larger_is_better


@pytest.mark.parametrize(
    ("settings", "larger_is_better"),
    [
        ({"keep_best": "val_accuracy"}, True),
        ({"keep_best": "auc_2"}, True),
        ({"keep_best": "val_loss"}, False),
        ({"keep_best": "mean_absolute_error"}, False),
        ({"keep_best": "top_5_categorical_accuracy"}, True),
        ({"keep_best": "val_score", "best_mode": "max"}, True),
        ({"keep_best": "val_accuracy", "best_mode": "min"}, False),
    ],
)
def test_the_name_of_a_metric_tells_which_way_is_better(settings: dict[str, str], larger_is_better: bool) -> None:
    assert CheckpointPolicy(**settings).larger_is_better is larger_is_better


# When


@pytest.mark.parametrize(
    ("settings", "begin", "calls", "saved"),
    [
        ({"every_steps": 4}, 0, range(1, 14), [4, 8, 12]),
        ({"every_steps": 4}, 14, range(15, 30), [16, 20, 24, 28]),
        ({"every_steps": 4}, 0, [3, 6, 7, 8, 9, 12], [6, 8, 12]),  # a call ran past the step, the next ones do not move
        ({"every_epochs": 2}, 0, range(1, 45), [20, 40]),
        ({"every_seconds": 5}, 0, [1, 4, 6, 9, 11, 15, 16], [6, 11, 16]),  # from the last checkpoint on
        ({"every_steps": 8, "every_seconds": 5}, 0, range(1, 20), [5, 8, 13, 16]),
        ({"every_steps": 6, "keep_every_steps": 4}, 0, range(1, 14), [4, 6, 8, 12]),  # what is to be kept is made
        ({"every_seconds": 60}, 1000, [1059, 1060], [1060]),  # since training began
        ({"every_seconds": 1}, 7, [7, 7], []),  # nothing is due before a step was made
    ],
)
def test_checkpoints_are_made_where_they_are_due(
    settings: dict[str, int], begin: int, calls: Sequence[int], saved: list[int]
) -> None:
    """Where a loop's calls end at `calls`, in epochs of ten steps, a second a step."""
    schedule = CheckpointSchedule(CheckpointPolicy(**settings), steps_per_epoch=10, step=begin)
    schedule.begin(float(begin))
    found = []
    for step in calls:
        if schedule.is_due(step, float(step)):
            schedule.record_save(step, float(step), cost_seconds=0.0)
            assert not schedule.is_due(step, step + 1e9)
            found.append(step)
    assert found == saved


# The interval that is worked out


def auto(mean_seconds_between_failures: float, *costs: float) -> CheckpointSchedule:
    """After checkpoints of such costs."""
    seldom = 10**6  # steps, which take no part in the interval
    policy = CheckpointPolicy(mean_seconds_between_failures=mean_seconds_between_failures, keep_every_steps=seldom)
    schedule = CheckpointSchedule(policy, steps_per_epoch=None)
    for step, cost in zip(itertools.count(1), costs, strict=False):
        schedule.record_save(step, 0.0, cost_seconds=cost)
    return schedule


@pytest.mark.parametrize(
    ("failures", "costs", "expected"),
    [
        (1e6, (), FIRST_SECONDS),  # within seconds of the start, though failures are rare
        (16.0, (), 2.0),  # √(2 · 0.125 · 16)
        (7200.0, (0.25,), 60.0),  # √(2 · 0.25 · 7200)
        (60.0, (5.0,), 5.0 / LARGEST_SHARE),  # no more than its share, where failures are frequent
        (7200.0, (3.0, 0.25, 0.25), 60.0),  # one slow checkpoint does not change it for long
        (7200.0, (3.0, 0.25, 0.25, *[1.0] * 10), 120.0),
    ],
)
def test_auto_makes_one_every_sqrt_of_twice_cost_times_failure_time(
    failures: float, costs: tuple[float, ...], expected: float
) -> None:
    schedule = auto(failures, *costs)
    assert schedule.interval_seconds == pytest.approx(expected)
    assert not schedule.is_due(100, 0.99 * expected) and schedule.is_due(100, 1.01 * expected)


def test_auto_does_not_begin_a_checkpoint_before_the_last_one_could_be_written() -> None:
    schedule = auto(60.0, 0.001)
    schedule.record_write(40.0)
    assert schedule.interval_seconds == 40.0


# Which checkpoints stay


def entry(step: int, *, created: str = "2026", **metrics: float) -> Entry:
    manifest = Manifest(step, created, {}, metrics, {}, (), 0, 0)
    return Entry(step, f"checkpoints/step-{step}-{created}", manifest)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep_last": 1}, [90]),
        ({"keep_last": 3}, [70, 80, 90]),
        ({"keep_last": 100}, [10, 20, 30, 40, 50, 60, 70, 80, 90]),
        ({"keep_last": 1, "keep_every_steps": 40}, [40, 80, 90]),
        ({"keep_last": 2, "keep_best": "val_loss"}, [30, 80, 90]),
        ({"keep_last": 1, "keep_best": "val_accuracy"}, [50, 90]),
        ({"keep_last": 1, "keep_best": "other_loss"}, [90]),
    ],
)
def test_the_policy_says_what_stays(settings: dict[str, object], kept: list[int]) -> None:
    entries = [entry(step, val_loss=abs(step - 30), val_accuracy=-abs(step - 50)) for step in range(10, 100, 10)]
    expired = catalog.find_expired(entries, CheckpointPolicy(**settings), newest=entries[-1])
    assert steps([each for each in entries if each not in expired]) == kept


def test_of_equally_good_checkpoints_the_first_stays_and_nan_is_never_best() -> None:
    entries = [entry(10, val_loss=1.0), entry(20, val_loss=1.0), entry(30, val_loss=float("nan")), entry(40)]
    expired = catalog.find_expired(entries, CheckpointPolicy(keep_last=1, keep_best="val_loss"), newest=entries[-1])
    assert steps(expired) == [20, 30]


def test_damaged_manifests_go_and_what_is_being_written_is_not_touched() -> None:
    damaged, in_flight = Entry(10, "a", None, "cut off"), Entry(40, "b", None, NO_MANIFEST)
    newest = entry(30)
    assert catalog.find_expired([damaged, newest, in_flight], CheckpointPolicy(), newest=newest) == [damaged]


@pytest.mark.slow
def test_the_manager_prunes_after_each_commit_and_knows_what_earlier_runs_left(tmp_path: pathlib.Path) -> None:
    settings = {"keep_last": 2, "keep_every_steps": 30, "keep_best": "val_loss"}
    for first in (10, 40):
        manager = new_manager(tmp_path, on_error="stop", **settings)
        for step in range(first, first + 30, 10):
            manager.save(state_of(step), metrics={"val_loss": abs(step - 20)})
        manager.close()
    assert steps(list_checkpoints(str(tmp_path))) == [20, 30, 50, 60]


DIRECTORY = "gs://bucket/run/checkpoints"


@pytest.mark.slow
def test_a_bucket_that_refuses_to_delete_holds_nothing_up_and_is_told_once(gcs: GcsServer) -> None:
    listener = Listener()
    manager = new_manager(DIRECTORY, listener, keep_last=1)
    gcs.faults.add(Fault("status", method="DELETE", count=None))
    begun = time.monotonic()
    for step in range(1, 6):
        manager.save(state_of(step))
        manager.wait()
    assert time.monotonic() - begun < 120  # 60 s for each of many that are refused, if it were asked again as else
    assert steps(list_checkpoints(DIRECTORY)) == [1, 2, 3, 4, 5]
    warned = [event for event in listener.events("checkpoint_not_removed") if event[0] == "warning"]
    assert len(warned) == 1 and "this is said once" in warned[0][-1]
    gcs.faults.clear()
    manager.save(state_of(6))
    manager.close()
    assert steps(list_checkpoints(DIRECTORY)) == [6]
    assert not listener.events("checkpoint_failed")
