"""How far a loop has come, and what its epoch has added up to.

Invariant: made of numbers, strings and dicts of them, as a backup keeps both.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist.training.step import Totals


@dataclasses.dataclass
class Outcome:
    """Where a loop ended."""

    step: int = 0
    stopped_early: bool = False
    train_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    eval_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluated_at: int = -1
    paused: bool = False


@dataclasses.dataclass
class EpochSums:
    """The loss of the epoch so far."""

    loss_sum: float = 0.0
    weight: float = 0.0
    term_sums: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, totals: Totals) -> None:
        self.loss_sum += float(totals.loss_sum)
        self.weight += float(totals.weight)
        for name, value in totals.term_sums.items():
            self.term_sums[name] = self.term_sums.get(name, 0.0) + float(value)

    def means(self) -> dict[str, float]:
        weight = self.weight or float("nan")
        return {"loss": self.loss_sum / weight} | {f"{n}_loss": v / weight for n, v in self.term_sums.items()}
