"""When to back up: at fixed steps, after some time, or after the time that costs least.

Invariant: nothing here reads a clock; what is due is a function of the steps and seconds passed in. The loop asks, ends
its calls at `next_boundary`, and says what each checkpoint took. With several workers one asks and tells the others,
since their clocks differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from tfdist.checkpoint.policy import CheckpointPolicy

FIRST_SECONDS = 5.0  # until the first checkpoint of the auto interval, at most, as its cost is not known yet
FIRST_COST = 0.125  # seconds, as which it is taken
LARGEST_SHARE = 0.01  # of the time for which training waits for checkpoints of the auto interval
REMEMBERED_COSTS = 5  # the first checkpoint may wait for its memory, and its cost should not count forever


class Schedule:
    """The checkpoints that a policy asks for; of several `every_…` whichever is due first.

    With no `every_…` set, the interval is √(2 · cost · mean time between failures), which loses the least time to
    checkpoints and to work done twice (J. W. Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17(9), 1974). The cost is what training waited, the median of the last ones measured. The
    interval is never so short that training waits for more than 1 % of the time, nor shorter than the last write. How
    long a write takes is no part of the cost: what a failure loses to that is the same for every interval.

    Args:
      policy: what to do.
      steps_per_epoch: for `every_epochs`; None where an epoch's length is not known, which `every_epochs` forbids.
      step: steps done when the loop begins; nothing is due until another is.
    """

    def __init__(self, policy: CheckpointPolicy, *, steps_per_epoch: int | None, step: int = 0) -> None:
        if policy.every_epochs and not steps_per_epoch:
            raise ValueError("every_epochs needs steps_per_epoch")
        self._policy = policy
        self._periods = [
            period for period in (policy.every_steps, (policy.every_epochs or 0) * (steps_per_epoch or 0)) if period
        ]
        self._step = step
        self._time = 0.0
        self._costs: list[float] = []
        self._write_seconds = 0.0

    def begin(self, now: float) -> None:
        """Training begins; `now` is in seconds of the clock whose readings `is_due` and `note_save` get."""
        self._time = now

    def next_boundary(self, step: int) -> int | None:
        """The first step after `step` at which a checkpoint falls by the count of steps; None: by the clock only."""
        return min(_next_multiples(step, self._periods), default=None)

    def is_due(self, step: int, now: float) -> bool:
        """Whether to back up after `step` steps, at the time `now`."""
        if step <= self._step:
            return False
        if any(boundary <= step for boundary in _next_multiples(self._step, self._periods)):
            return True
        seconds = self.interval_seconds
        return seconds is not None and now - self._time >= seconds

    @property
    def interval_seconds(self) -> float | None:
        """From one checkpoint to the next by the clock; None: only steps count."""
        if self._policy.every_seconds is not None:
            return self._policy.every_seconds
        if self._periods:
            return None
        wait = statistics.median(self._costs or [FIRST_COST])
        best = math.sqrt(2 * wait * self._policy.mean_seconds_between_failures)
        if not self._costs:
            return min(best, FIRST_SECONDS)
        return max(best, wait / LARGEST_SHARE, self._write_seconds)

    def note_save(self, step: int, now: float, *, cost_seconds: float) -> None:
        """A checkpoint of `step` was taken by `now` and kept the training waiting for `cost_seconds`."""
        self._step = step
        self._time = now
        self._costs = [*self._costs, cost_seconds][-REMEMBERED_COSTS:]

    def note_write(self, seconds: float) -> None:
        """The last checkpoint took `seconds` from its copy in memory to its commit."""
        self._write_seconds = seconds


def _next_multiples(step: int, periods: list[int]) -> Iterator[int]:
    return ((step // period + 1) * period for period in periods)
