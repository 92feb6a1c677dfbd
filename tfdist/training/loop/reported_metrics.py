"""The metrics that a training reports, by name, for settings that name one.

Invariant: a name is refused before the first step where it is known that nothing will bear it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
      names: its own metrics, and of how many numbers each is; None where one does not tell before it counts.
      evaluates: whether an evaluation reports the same names with `val_` before them.
    """

    names: Mapping[str, int] | None
    evaluates: bool

    def check(self, setting: str, name: str | None) -> None:
        """Raises UserError where a setting, such as "tune.objective is", names what is not reported as one number."""
        if name is None:
            return
        if name.startswith(VALIDATION) and not self.evaluates:
            raise not_evaluated(setting, name)
        if self.names is None:
            return
        known = {**self.names, **{f"{VALIDATION}{each}": n for each, n in self.names.items() if self.evaluates}}
        if name not in known:
            raise not_reported(setting, name, list(known))
        if known[name] > 1:
            raise UserError(
                f"{setting} {name!r}, which gives {known[name]:,} numbers. Name a metric of one number, such as "
                "keras.metrics.F1Score(average='macro') gives."
            )


def reported_by(metrics: MetricGroup, task: Task, *, evaluates: bool) -> Reported:
    """What a training with these metrics and this task's loss reports."""
    names = metrics.reported_names()
    losses = dict.fromkeys(["loss", *(f"{term}_loss" for term in task.term_names())], 1)
    own = None if names is None else losses | names
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
