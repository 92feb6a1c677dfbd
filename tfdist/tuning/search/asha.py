"""Asynchronous successive halving as an oracle of KerasTuner's interface: random values, and poor trials end at rungs.

Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020 (arXiv 1810.05934), in the variant of
Ray Tune's ASHAScheduler and Optuna's SuccessiveHalvingPruner: a trial that is stopped at a rung does not come back.

Invariant: `update_trial` answers with the status STOPPED for a trial that should end, and only then.
"""

from __future__ import annotations

import math
from typing import Any

import keras_tuner

from tfdist.tuning.search.oracles import Random


class AshaStopping(Random):
    """The oracle that stops a trial at a rung unless it is among the best of those that got there before.

    Of n trials with a value at the rung, its own included, ⌊n ÷ factor⌋ continue, and at least the best.

    Args:
      max_epochs: of a whole training.
      min_epochs: of the first rung.
      factor: of the trials that reached a rung one in `factor` continues, to `factor` times the epochs.
      arguments: of KerasTuner's random search.
    """

    def __init__(self, *, max_epochs: int, min_epochs: int, factor: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._rung_epochs = rungs(min_epochs, max_epochs, factor)
        self._factor = factor

    @keras_tuner.synchronized
    def update_trial(self, trial_id: str, metrics: dict[str, float], step: int = 0) -> keras_tuner.engine.trial.Trial:
        trial = super().update_trial(trial_id, metrics, step)
        if step in self._rung_epochs:
            reached = {name: at for name, other in self.trials.items() if (at := self._at(other, step)) is not None}
            sign = -1.0 if self.objective.direction == "max" else 1.0
            cost = {name: sign * at if math.isfinite(at) else math.inf for name, at in reached.items()}
            best_first = sorted(cost, key=cost.__getitem__)
            if best_first.index(trial_id) >= max(1, len(reached) // self._factor):
                trial.status = "STOPPED"
        return trial

    def _at(self, trial: keras_tuner.engine.trial.Trial, step: int) -> float | None:
        if not trial.metrics.exists(self.objective.name):
            return None
        history = trial.metrics.get_history(self.objective.name)
        return next((each.mean() for each in history if each.step == step), None)


def rungs(min_epochs: int, max_epochs: int, factor: int) -> list[int]:
    """The epochs of each rung below `max_epochs`: `min_epochs`, `factor` times as many, …."""
    found = []
    while min_epochs < max_epochs:
        found.append(min_epochs)
        min_epochs *= factor
    return found
