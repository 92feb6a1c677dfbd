"""What a sweep optimizes: a metric by name, and whether more or less of it is better.

Invariant: `val_NAME` is the metric NAME of the evaluation, any other name one of training. Knows no search.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tfdist.errors import UserError
from tfdist.telemetry.registry import larger_is_better
from tfdist.training.loop.best import OBJECTIVE, VALIDATION, not_evaluated, not_reported

DIRECTIONS = ("min", "max")


@dataclasses.dataclass(frozen=True)
class Objective:
    """A metric and its better end, "min" or "max"."""

    name: str
    direction: str

    @property
    def split(self) -> str:
        """The split of metrics.jsonl that holds it."""
        return "eval" if self.name.startswith(VALIDATION) else "train"

    def of(self, metrics: Mapping[str, Any]) -> float | None:
        """Its value among the metrics of its split; None where they have none, NaN where it is not finite."""
        value = metrics.get(self.name.removeprefix(VALIDATION))
        if isinstance(value, str):  # how json_text writes what is not finite
            return math.nan
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def missing(self, metrics: Mapping[str, Any]) -> UserError:
        """The error for metrics of its split that do not have it."""
        if not metrics:
            return not_evaluated(OBJECTIVE, self.name)
        known = [name for name, value in self.named(metrics).items() if isinstance(value, int | float)]
        return not_reported(OBJECTIVE, self.name, known)

    def named(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics of its split, by the names that an objective has."""
        return {f"{VALIDATION if self.split == 'eval' else ''}{name}": value for name, value in metrics.items()}


def build_objective(name: object, direction: object) -> Objective:
    """The objective that is meant; without a direction its name tells it.

    Raises:
      UserError: it is no name, no direction, or a name that tells none.
    """
    if not isinstance(name, str) or not name:
        raise UserError(f"tune.objective must be a metric's name, such as 'val_accuracy'; received {name!r}.")
    if direction is None:
        better = larger_is_better(name.removeprefix(VALIDATION))
        if better is not None:
            return Objective(name, "max" if better else "min")
        raise UserError(f"Whether {name!r} should grow or shrink is not clear. Write tune.direction = 'max' or 'min'.")
    if direction not in DIRECTIONS:
        raise UserError(f"tune.direction must be 'min' or 'max'; received {direction!r}.")
    return Objective(name, direction)
