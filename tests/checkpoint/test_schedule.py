"""Checkpoints fall at the steps and times that the policy asks for."""

from __future__ import annotations

import itertools
import math

import pytest

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.schedule import FIRST_SECONDS, LARGEST_SHARE, Schedule


def steps_of(policy: CheckpointPolicy, *, calls: list[int], steps_per_epoch: int = 10, begin: int = 0) -> list[int]:
    """The steps at which checkpoints are made when a loop's calls end at `calls`, a second a step."""
    schedule = Schedule(policy, steps_per_epoch=steps_per_epoch, step=begin)
    schedule.begin(float(begin))
    saved = []
    for step in calls:
        if schedule.due(step, float(step)):
            schedule.saved(step, float(step), cost_seconds=0.0)
            saved.append(step)
    return saved


def test_every_steps_is_met_at_its_multiples() -> None:
    assert steps_of(CheckpointPolicy(every_steps=4), calls=list(range(1, 14))) == [4, 8, 12]


def test_a_call_that_ran_past_the_step_is_followed_by_the_checkpoint_at_once_and_the_next_ones_stay_in_place() -> None:
    assert steps_of(CheckpointPolicy(every_steps=4), calls=[3, 6, 7, 8, 9, 12]) == [6, 8, 12]


def test_a_resumed_run_backs_up_at_the_same_steps() -> None:
    whole = steps_of(CheckpointPolicy(every_steps=4), calls=list(range(1, 30)))
    resumed = steps_of(CheckpointPolicy(every_steps=4), calls=list(range(15, 30)), begin=14)
    assert resumed == [step for step in whole if step > 14]


def test_every_epochs_counts_whole_epochs() -> None:
    assert steps_of(CheckpointPolicy(every_epochs=2), calls=list(range(1, 45)), steps_per_epoch=10) == [20, 40]


def test_every_epochs_needs_the_length_of_an_epoch() -> None:
    with pytest.raises(ValueError, match="steps_per_epoch"):
        Schedule(CheckpointPolicy(every_epochs=1), steps_per_epoch=None)


def test_every_seconds_counts_from_the_last_checkpoint() -> None:
    assert steps_of(CheckpointPolicy(every_seconds=5), calls=[1, 4, 6, 9, 11, 15, 16]) == [6, 11, 16]


def test_what_is_due_first_counts_and_restarts_the_clock() -> None:
    policy = CheckpointPolicy(every_steps=8, every_seconds=5)
    assert steps_of(policy, calls=list(range(1, 20))) == [5, 8, 13, 16]


def test_nothing_is_due_before_a_step_was_made() -> None:
    schedule = Schedule(CheckpointPolicy(every_seconds=1), steps_per_epoch=10, step=7)
    assert not schedule.due(7, 100.0)
    assert schedule.due(8, 100.0)
    schedule.saved(8, 100.0, cost_seconds=0.1)
    assert not schedule.due(8, 200.0)


@pytest.mark.parametrize(
    ("policy", "step", "expected"),
    [
        (CheckpointPolicy(every_steps=4), 0, 4),
        (CheckpointPolicy(every_steps=4), 4, 8),
        (CheckpointPolicy(every_epochs=1), 13, 20),
        (CheckpointPolicy(every_epochs=2), 13, 20),
        (CheckpointPolicy(every_steps=15, every_epochs=2), 13, 15),
        (CheckpointPolicy(every_steps=15, every_epochs=2), 15, 20),
        (CheckpointPolicy(every_seconds=3), 13, None),
        (CheckpointPolicy(), 13, None),
    ],
)
def test_the_next_boundary_is_the_next_step_that_counts(
    policy: CheckpointPolicy, step: int, expected: int | None
) -> None:
    assert Schedule(policy, steps_per_epoch=10).next_boundary(step) == expected


# The interval that is worked out


def test_auto_makes_the_first_one_soon_and_then_every_sqrt_of_twice_cost_times_failure_time() -> None:
    policy = CheckpointPolicy(mean_seconds_between_failures=7200.0)
    schedule = Schedule(policy, steps_per_epoch=None)
    assert not schedule.due(1, FIRST_SECONDS - 1)
    assert schedule.due(2, FIRST_SECONDS)
    schedule.saved(2, FIRST_SECONDS, cost_seconds=0.25)
    assert schedule.interval_seconds == pytest.approx(60.0)  # √(2 · 0.25 · 7200)
    assert not schedule.due(3, FIRST_SECONDS + 59.9)
    assert schedule.due(3, FIRST_SECONDS + 60.1)


def test_auto_makes_the_first_one_within_seconds_of_the_start_though_failures_are_rare() -> None:
    schedule = Schedule(CheckpointPolicy(mean_seconds_between_failures=1e6), steps_per_epoch=None)
    schedule.begin(100.0)
    assert schedule.due(1, 105.0)
    schedule.saved(1, 105.0, cost_seconds=2.0)
    assert not schedule.due(2, 105.0 + 2.0 / LARGEST_SHARE - 1)  # and pays for it afterwards


def test_auto_makes_the_first_one_sooner_where_failures_are_frequent() -> None:
    schedule = Schedule(CheckpointPolicy(mean_seconds_between_failures=16.0), steps_per_epoch=None)
    assert schedule.interval_seconds == pytest.approx(2.0)  # √(2 · 0.125 · 16)


def test_youngs_interval_loses_less_time_than_others_near_it() -> None:
    cost, failures = 0.25, 7200.0
    schedule = Schedule(CheckpointPolicy(mean_seconds_between_failures=failures), steps_per_epoch=None)
    schedule.saved(1, 0.0, cost_seconds=cost)

    def lost_share(interval: float) -> float:
        """Of a second of work: saving, and redoing half an interval per failure."""
        return cost / interval + interval / 2 / failures

    assert schedule.interval_seconds is not None
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert lost_share(schedule.interval_seconds) < lost_share(schedule.interval_seconds * factor)


def test_auto_spends_no_more_than_its_share_where_failures_are_frequent() -> None:
    schedule = Schedule(CheckpointPolicy(mean_seconds_between_failures=60.0), steps_per_epoch=None)
    schedule.saved(1, 0.0, cost_seconds=5.0)
    assert schedule.interval_seconds == pytest.approx(5.0 / LARGEST_SHARE)
    assert schedule.interval_seconds > math.sqrt(2 * 5.0 * 60.0)


def test_auto_does_not_begin_a_checkpoint_before_the_last_one_could_be_written() -> None:
    schedule = Schedule(CheckpointPolicy(mean_seconds_between_failures=60.0), steps_per_epoch=None)
    schedule.saved(1, 0.0, cost_seconds=0.001)
    schedule.written(40.0)
    assert schedule.interval_seconds == 40.0


def test_one_slow_checkpoint_does_not_change_the_interval_for_long() -> None:
    schedule = Schedule(CheckpointPolicy(mean_seconds_between_failures=7200.0), steps_per_epoch=None)
    for step, cost in zip(itertools.count(1), [3.0, 0.25, 0.25], strict=False):
        schedule.saved(step, float(step), cost_seconds=cost)
    assert schedule.interval_seconds == pytest.approx(60.0)
    for step in range(10, 20):
        schedule.saved(step, float(step), cost_seconds=1.0)
    assert schedule.interval_seconds == pytest.approx(120.0)


@pytest.mark.slow
def test_the_clock_starts_when_training_begins_not_when_the_run_is_built() -> None:
    schedule = Schedule(CheckpointPolicy(every_seconds=60), steps_per_epoch=None)
    schedule.begin(1000.0)
    assert not schedule.due(1, 1059.0) and schedule.due(2, 1060.0)
