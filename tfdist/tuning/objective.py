"""What a sweep optimises: a metric by name, and whether more or less of it is better.

Invariant: `val_NAME` is the metric NAME of the evaluation, any other name one of training. Knows no search.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist.errors import UserError, suggest
from tfdist.telemetry.metric_direction import larger_is_better

if TYPE_CHECKING:
    from tfdist.tasks.base import Task
    from tfdist.training.metrics import MetricGroup

DIRECTIONS = ("min", "max")
VALIDATION = "val_"


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

    def cost(self, value: float) -> float:
        """What is better is less."""
        return value if self.direction == "min" else -value

    def missing(self, metrics: Mapping[str, Any]) -> UserError:
        """The error for metrics of its split that do not have it."""
        prefix = VALIDATION if self.split == "eval" else ""
        if not metrics:
            return UserError(
                f"tune.objective is {self.name!r}, and the trials evaluate nothing. Write train.eval_data, or an "
                "objective of training, such as 'loss'."
            )
        known = [f"{prefix}{name}" for name, value in metrics.items() if isinstance(value, int | float)]
        return UserError(
            f"tune.objective is {self.name!r}, which the trials do not report.{suggest(self.name, known)} "
            f"They report {', '.join(known)}."
        )


def check_reported(name: str | None, metrics: MetricGroup, task: Task, *, evaluates: bool) -> None:
    """Raises UserError where it is known already that a training will not report a metric of this name."""
    if name is None:
        return
    objective = Objective(name, "max")
    if objective.split == "eval" and not evaluates:
        raise objective.missing({})
    known = reported_names(metrics, task)
    if known is not None and name.removeprefix(VALIDATION) not in known:
        raise objective.missing(dict.fromkeys(known, 0.0))


def reported_names(metrics: MetricGroup, task: Task) -> list[str] | None:
    """What each split of a training reports; None where a metric does not tell before it counts."""
    names = metrics.reported_names()
    return None if names is None else ["loss", *(f"{term}_loss" for term in task.term_names()), *names]


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
