"""Calls grow until they take about 0.1 s by the chief's clock, and stay so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tfdist.training.loop.boundaries import Pace


class ClockOf:
    """As much of a strategy as agrees on the chief's time, which is so many times this worker's."""

    def __init__(self, chief: float = 1.0) -> None:
        self.chief, self.asked = chief, 0

    def from_chief(self, values: Sequence[float]) -> np.ndarray:
        self.asked += 1
        return np.array([self.chief * values[0]])


def observed(pace: Pace, step_seconds: float, calls: int = 30) -> list[int]:
    lengths = []
    for _ in range(calls):
        lengths.append(pace.steps_per_call)
        pace.observe(pace.steps_per_call, pace.steps_per_call * step_seconds)
    return lengths


@pytest.mark.parametrize(("chief", "step_seconds"), [(1.0, 0.004), (0.1, 0.04)], ids=["own", "chief's"])
def test_calls_double_until_they_take_long_enough_by_the_chiefs_clock(chief: float, step_seconds: float) -> None:
    strategy = ClockOf(chief)
    pace = Pace(strategy, None)
    assert observed(pace, step_seconds)[:7] == [1, 1, 2, 4, 8, 16, 16]
    assert pace.settled and pace.steps_per_call == 16
    assert strategy.asked == 5  # nothing is agreed on any more


def test_a_call_cut_short_by_a_boundary_tells_nothing() -> None:
    strategy = ClockOf()
    pace = Pace(strategy, None)
    observed(pace, 0.001, calls=4)
    length, asked = pace.steps_per_call, strategy.asked
    pace.observe(length - 1, 10.0)
    assert (pace.steps_per_call, strategy.asked, pace.settled) == (length, asked, False)
