"""How far a loop has come, and what its epoch has added up to.

Invariant: made of numbers, strings and dicts of them, as a checkpoint keeps both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.training.step.step import Totals


@dataclasses.dataclass
class Outcome:
    """Where a loop ended; `best` as `best.Watched.newest` gives it, `weightless` as `Totals`, over the whole run."""

    step: int = 0
    stopped_early: bool = False
    train_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    eval_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluated_at: int = -1
    paused: bool = False
    best: dict[str, Any] | None = None
    weightless: int = 0


@dataclasses.dataclass
class EpochSums:
    """The loss of the epoch so far, and how many of its steps had examples that weigh nothing.

    Attributes:
      recent: the losses of the last steps, oldest first, NaN before the run has so many; epochs do not end it.
    """

    loss_sum: float = 0.0
    weight: float = 0.0
    term_sums: dict[str, float] = dataclasses.field(default_factory=dict)
    weightless: int = 0
    recent: list[float] = dataclasses.field(default_factory=list)

    def after(self, totals: Totals) -> EpochSums:
        """These sums after a call of the step function, which has added to them."""
        return EpochSums(
            float(totals.loss_sum),
            float(totals.weight),
            {n: float(v) for n, v in totals.term_sums.items()},
            self.weightless + int(totals.weightless),
            totals.recent.numpy().tolist(),
        )

    def vector(self, term_names: Sequence[str]) -> np.ndarray:
        """float64 [2 + terms + recent], for the next call to add to."""
        terms = (self.term_sums.get(name, 0.0) for name in term_names)
        return np.array([self.loss_sum, self.weight, *terms, *self.recent])

    def means(self) -> dict[str, float]:
        """The losses to report; none where nothing has weighed anything."""
        if self.weightless and not self.weight:
            return {}
        weight = self.weight or float("nan")
        return {"loss": self.loss_sum / weight} | {f"{n}_loss": v / weight for n, v in self.term_sums.items()}
