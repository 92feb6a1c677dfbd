"""The metrics that a training reports, by name, for settings that name one.

Invariant: a name is refused before the first step where it is known that nothing will bear it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.errors import UserError, suggest

if TYPE_CHECKING:  # sweeps use this without TensorFlow
    from tfdist.tasks.base import Task
    from tfdist.training.step.metrics import MetricGroup

VALIDATION = "val_"  # before the names of the evaluation
OBJECTIVE = "tune.objective is"


@dataclasses.dataclass(frozen=True)
class Reported:
    """What a training reports.

    Attributes:
      names: of its own metrics; None where one of them does not tell before it counts.
      evaluates: whether an evaluation reports the same names with `val_` before them.
    """

    names: Sequence[str] | None
    evaluates: bool

    def check(self, setting: str, name: str | None) -> None:
        """Raises UserError where a setting, such as "tune.objective is", names what will not be reported."""
        if name is None:
            return
        if name.startswith(VALIDATION) and not self.evaluates:
            raise not_evaluated(setting, name)
        if self.names is None:
            return
        known = [*self.names, *(f"{VALIDATION}{each}" for each in self.names if self.evaluates)]
        if name not in known:
            raise not_reported(setting, name, known)


def reported_by(metrics: MetricGroup, task: Task, *, evaluates: bool) -> Reported:
    """What a training with these metrics and this task's loss reports."""
    names = metrics.reported_names()
    own = None if names is None else ["loss", *(f"{term}_loss" for term in task.term_names()), *names]
    return Reported(own, evaluates)


def not_evaluated(setting: str, name: str) -> UserError:
    """The error for a metric of an evaluation that there is none of."""
    return UserError(
        f"{setting} {name!r}, and nothing is evaluated. Write train.eval_data, or name a metric of the training, such "
        "as 'loss'."
    )


def not_reported(setting: str, name: str, known: Sequence[str]) -> UserError:
    """The error for a metric that nothing reports, with those that something does."""
    return UserError(f"{setting} {name!r}, which is not reported.{suggest(name, known)} Reported: {', '.join(known)}.")
