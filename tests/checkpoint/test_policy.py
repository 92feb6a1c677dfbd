"""The settings of `train.checkpoint`: what is refused, and how; when checkpoints are made."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

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
    policy = CheckpointPolicy(mean_seconds_between_failures=mean_seconds_between_failures)
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
