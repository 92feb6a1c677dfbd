"""The best that a run has come to so far, by one metric: what result.json names and what `keep_best` keeps.

Invariant: it follows from reported numbers alone, which are the same on every worker, so all of them agree on it
without a word. The loop asks after each evaluation and each epoch; a checkpoint keeps it, as part of the outcome.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.telemetry.metric_direction import larger_is_better
from tfdist.training.loop.reported_metrics import VALIDATION, Reported, not_reported
from tfdist.training.run.settings import TrainSettings

KEEP_BEST = f"{CheckpointPolicy.NAME}.keep_best is"


@dataclasses.dataclass(frozen=True)
class Watched:
    """The metric by which evaluations are compared.

    Attributes:
      metric: its name, `val_NAME` for one of the evaluation.
      is_larger_better: which way.
      saves: whether each new best is to be backed up.
    """

    metric: str
    is_larger_better: bool
    saves: bool = False

    @property
    def is_of_evaluation(self) -> bool:
        return self.metric.startswith(VALIDATION)

    def newest(self, best: Mapping[str, Any] | None, logs: Mapping[str, Any], *, step: int, epoch: int) -> Any:
        """What is the best now: `best` itself, or a new one out of `logs`, as result.json has it. `epoch` is from 1.

        Raises:
          UserError: `logs` do not have the metric, whose best is to be backed up, though they have the loss (which is
        left out where examples weigh nothing in all).
        """
        value = logs.get(self.metric)
        if not isinstance(value, int | float):
            if self.saves and (f"{VALIDATION}loss" if self.is_of_evaluation else "loss") in logs:
                raise not_reported(KEEP_BEST, self.metric, [n for n, v in logs.items() if isinstance(v, int | float)])
            return best
        known = best["value"] if best is not None and best["metric"] == self.metric else None
        is_better = known is None or (value > known if self.is_larger_better else value < known)
        if math.isnan(value) or not is_better:
            return best
        return {"metric": self.metric, "value": value, "epoch": epoch, "step": step}


def check_keep_best(policy: CheckpointPolicy | None, reported: Reported) -> None:
    """Raises UserError where nothing reports the metric that names the best checkpoint, or its direction is unknown."""
    if policy is not None and policy.keep_best is not None:
        reported.check(KEEP_BEST, policy.keep_best)
        _ = policy.larger_is_better


def watched(settings: TrainSettings) -> Watched:
    """By what a run's evaluations are compared: `keep_best`, else what a callback monitors, else the loss."""
    policy, evaluates = settings.policy, settings.evaluates
    if policy is not None and policy.keep_best is not None:
        return Watched(policy.keep_best, policy.larger_is_better, saves=True)
    for callback in settings.callbacks:
        monitor = getattr(callback, "monitor", None)
        if not isinstance(monitor, str) or (monitor.startswith(VALIDATION) and not evaluates):
            continue
        mode = getattr(callback, "mode", "auto")
        is_larger_better = larger_is_better(monitor) if mode not in ("min", "max") else mode == "max"
        if is_larger_better is not None:
            return Watched(monitor, is_larger_better)
    return Watched("val_loss" if evaluates else "loss", False)
