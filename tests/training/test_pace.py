"""Calls grow until they take about 0.1 s by the chief's clock, and stay so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tfdist.training.loop.boundaries import Pace


@dataclasses.dataclass
class ClockOf:
    """A strategy that agrees on the chief's time; `chief` None is the chief itself."""

    chief: float | None = None
    asked: int = 0

    def from_chief(self, values: Sequence[float]) -> np.ndarray:
        self.asked += 1
        return np.array(values if self.chief is None else [self.chief * values[0]])


def observed(pace: Pace, step_seconds: float, calls: int = 30) -> list[int]:
    lengths = []
    for _ in range(calls):
        lengths.append(pace.steps_per_call)
        pace.observe(pace.steps_per_call, pace.steps_per_call * step_seconds)
    return lengths


def new(**settings: Any) -> tuple[ClockOf, Pace]:
    strategy = ClockOf(**settings)
    return strategy, Pace(strategy, None)


def test_calls_double_until_they_take_long_enough() -> None:
    strategy, pace = new()
    assert observed(pace, 0.004)[:7] == [1, 1, 2, 4, 8, 16, 16]
    assert pace.settled and pace.steps_per_call == 16
    assert strategy.asked == 5  # nothing is agreed on any more


def test_a_call_cut_short_by_a_boundary_tells_nothing() -> None:
    strategy, pace = new()
    observed(pace, 0.001, calls=4)
    length, asked = pace.steps_per_call, strategy.asked
    pace.observe(length - 1, 10.0)
    assert (pace.steps_per_call, strategy.asked, pace.settled) == (length, asked, False)


def test_all_follow_the_chiefs_clock() -> None:
    _, chief = new()
    _, slower = new(chief=0.1)  # this worker measures ten times the chief's seconds
    assert observed(chief, 0.001) == observed(slower, 0.01)


@pytest.mark.parametrize("steps", [1, 7])
def test_a_given_number_stays_and_nothing_is_agreed_on(steps: int) -> None:
    strategy = ClockOf()
    pace = Pace(strategy, steps)
    assert set(observed(pace, 0.001)) == {steps}
    assert strategy.asked == 0
