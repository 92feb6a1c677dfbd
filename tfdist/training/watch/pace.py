"""How many steps to run in one call of the step function."""

from __future__ import annotations

from tfdist.strategies.base import Strategy

TARGET_SECONDS = 0.1
LONGEST_CALL = 4096


class Pace:
    """Steps per call: given, or doubled from 1 until a call takes about 0.1 s.

    A longer call saves a return to Python per step, a shorter one lets the loop react sooner. All workers follow the
    chief's clock, so that they call alike; once found, the number stays.
    """

    def __init__(self, strategy: Strategy, steps_per_call: int | None) -> None:
        self._strategy = strategy
        self.steps_per_call = steps_per_call or 1
        self.settled = steps_per_call is not None
        self._traced = False

    def observe(self, steps: int, seconds: float) -> None:
        """Takes note of a call of `steps` steps that took `seconds`. A collective until the number is settled."""
        if self.settled:
            return
        if not self._traced:  # the first call traces and compiles; its time tells nothing
            self._traced = True
            return
        if steps < self.steps_per_call:  # cut short by a boundary; every worker sees that alike
            return
        seconds = float(self._strategy.from_chief([seconds])[0])
        if seconds >= TARGET_SECONDS / 2 or self.steps_per_call >= LONGEST_CALL:
            self.settled = True
        else:
            self.steps_per_call *= 2
