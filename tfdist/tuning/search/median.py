"""Median stopping as an oracle of KerasTuner's interface: random values, and poor trials end early.

Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, section 3.2.2: a trial is stopped at
an epoch if its best objective so far is worse than the median, over the finished trials, of their mean objective up to
that epoch.

Invariant: `update_trial` answers with the status STOPPED for a trial that should end, and only then.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import keras_tuner

from tfdist.tuning.search.oracles import Random


class MedianStopping(Random):
    """The oracle.

    Args:
      min_trials: how many have to be finished before any is stopped.
      min_epochs: how many epochs each trial gets.
      arguments: of KerasTuner's random search.
    """

    def __init__(self, *, min_trials: int, min_epochs: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._min_trials = min_trials
        self._min_epochs = min_epochs

    @keras_tuner.synchronized
    def update_trial(self, trial_id: str, metrics: dict[str, float], step: int = 0) -> keras_tuner.engine.trial.Trial:
        trial = super().update_trial(trial_id, metrics, step)
        if step >= self._min_epochs and self._is_poor(trial, step):
            trial.status = "STOPPED"
        return trial

    def _is_poor(self, trial: keras_tuner.engine.trial.Trial, step: int) -> bool:
        means = [
            statistics.fmean(curve)
            for other in self.trials.values()
            if other.status == "COMPLETED" and (curve := self._curve(other, step))
        ]
        own = self._curve(trial, step)
        if len(means) < self._min_trials or not own:
            return False
        return min(own) > statistics.median(means)

    def _curve(self, trial: keras_tuner.engine.trial.Trial, last_step: int) -> list[float]:
        """What a trial reported up to an epoch; less is better."""
        if not trial.metrics.exists(self.objective.name):
            return []
        sign = -1.0 if self.objective.direction == "max" else 1.0
        told = [each.mean() for each in trial.metrics.get_history(self.objective.name) if each.step <= last_step]
        return [sign * value for value in told if math.isfinite(value)]
