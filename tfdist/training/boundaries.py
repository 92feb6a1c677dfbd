"""The steps at which a call of the step function has to end, because something else comes first.

Invariant: they follow from the settings alone, so every worker meets the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection


@dataclasses.dataclass(frozen=True)
class Length:
    """How long a run is to be, by passes over its data and by steps; with both, what comes first ends it."""

    epochs: int | None = None
    steps: int | None = None

    def total_steps(self, steps_per_epoch: int) -> int:
        """The last step; one of the two is given."""
        return min(limit for limit in (self.steps, self.epochs and self.epochs * steps_per_epoch) if limit)


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """The steps at which a call has to end.

    Args:
      total_steps: the last step of the run.
      steps_per_epoch: of the training data, or as many as are to count as an epoch.
      eval_every_steps: None evaluates at the end of each epoch.
      eval_every_epochs: evaluates at the end of every so many epochs, or of those listed, counted from 1.
      log_every_steps: None logs at the end of each epoch only.
      pause_step: the step at which the run is saved and left for another time; the end of an epoch.
    """

    total_steps: int
    steps_per_epoch: int
    eval_every_steps: int | None = None
    log_every_steps: int | None = None
    pause_step: int | None = None
    eval_every_epochs: int | Collection[int] = 1

    @property
    def last_step(self) -> int:
        """The step at which this process ends."""
        return self.total_steps if self.pause_step is None else min(self.total_steps, self.pause_step)

    def next_after(self, step: int) -> int:
        periods = [self.steps_per_epoch, self.eval_every_steps, self.log_every_steps]
        return min(self.last_step, *((step // period + 1) * period for period in periods if period))

    def ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0 or step == self.total_steps

    def evaluates(self, step: int) -> bool:
        if self.eval_every_steps is None:
            return self.ends_epoch(step) and self._evaluates_epoch(-(-step // self.steps_per_epoch))
        return step % self.eval_every_steps == 0 or step == self.total_steps

    def _evaluates_epoch(self, number: int) -> bool:
        if isinstance(self.eval_every_epochs, int):
            return number % self.eval_every_epochs == 0
        return number in self.eval_every_epochs

    def logs(self, step: int) -> bool:
        return bool(self.log_every_steps) and step % self.log_every_steps == 0 and not self.ends_epoch(step)
