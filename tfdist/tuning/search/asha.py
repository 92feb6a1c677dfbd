"""Asynchronous successive halving as oracles of KerasTuner's interface: one pauses trials, the other stops them.

Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020 (arXiv 1810.05934), algorithm 2. The
variant that stops a trial at a rung and never comes back to it is that of Ray Tune's ASHAScheduler and of Optuna's
SuccessiveHalvingPruner.

Invariant of `Asha`: only the best `1 / factor` of a rung's trials continue, each once; whoever asks never waits as long
as new values may be tried. A trial that continues is told as KerasTuner's Hyperband tells it, by `tuner/trial_id`,
`tuner/epochs` and `tuner/round`.
"""

from __future__ import annotations

from typing import Any

import keras_tuner

from tfdist.tuning.search.oracles import EPOCHS, INITIAL_EPOCH, PARENT, ROUND, Journaled, Random


class Asha(Journaled, keras_tuner.Oracle):
    """The oracle.

    Args:
      num_trials: how many sets of values are tried.
      max_epochs: of the last rung.
      min_epochs: of the first.
      factor: of the trials of a rung one in `factor` continues, to `factor` times the epochs.
      arguments: of `keras_tuner.Oracle`.
    """

    def __init__(self, *, num_trials: int, max_epochs: int, min_epochs: int, factor: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._num_trials = num_trials
        self._factor = factor
        self.rung_epochs = rungs(min_epochs, max_epochs, factor)
        self._rungs: list[list[str]] = [[] for _ in self.rung_epochs]  # the trials that were started in each
        self._promoted: set[str] = set()

    def populate_space(self, trial_id: str) -> dict[str, Any]:
        best = self._promotable()
        if best is not None:
            rung, trial = best
            self._promoted.add(trial.trial_id)
            self._rungs[rung + 1].append(trial_id)
            values = dict(trial.hyperparameters.values)
            return {"status": "RUNNING", "values": values | self._own_values(rung + 1, trial.trial_id)}
        if len(self._rungs[0]) < self._num_trials and (values := self._random_values()) is not None:
            self._rungs[0].append(trial_id)
            return {"status": "RUNNING", "values": values | self._own_values(0, None)}
        return {"status": "IDLE" if self.ongoing_trials else "STOPPED"}

    def _promotable(self) -> tuple[int, keras_tuner.engine.trial.Trial] | None:
        """The best trial that may continue, and its rung; the highest rung first."""
        for rung in reversed(range(len(self._rungs) - 1)):
            ended = [self.trials[name] for name in self._rungs[rung]]
            ended = [trial for trial in ended if trial.status == "COMPLETED"]
            best_first = sorted(ended, key=lambda trial: trial.score, reverse=self.objective.direction == "max")
            for trial in best_first[: len(ended) // self._factor]:
                if trial.trial_id not in self._promoted:
                    return rung, trial
        return None

    def _own_values(self, rung: int, parent: str | None) -> dict[str, Any]:
        before = self.rung_epochs[rung - 1] if rung else 0
        own = {EPOCHS: self.rung_epochs[rung], INITIAL_EPOCH: before, ROUND: rung}
        return own if parent is None else own | {PARENT: parent}

    def _compute_values_hash(self, values: dict[str, Any]) -> str:
        return super()._compute_values_hash({k: v for k, v in values.items() if not k.startswith("tuner/")})


class AshaStopping(Random):
    """The oracle that stops a trial at a rung unless it is among the best of those that got there before.

    Of n trials with a value at the rung, its own included, ⌊n ÷ factor⌋ continue, and at least the best.

    Args:
      max_epochs, min_epochs, factor: as for `Asha`.
      arguments: of KerasTuner's random search.
    """

    def __init__(self, *, max_epochs: int, min_epochs: int, factor: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._rung_epochs = rungs(min_epochs, max_epochs, factor)[:-1]
        self._factor = factor

    @keras_tuner.synchronized
    def update_trial(self, trial_id: str, metrics: dict[str, float], step: int = 0) -> keras_tuner.engine.trial.Trial:
        trial = super().update_trial(trial_id, metrics, step)
        if step in self._rung_epochs:
            reached = {name: at for name, other in self.trials.items() if (at := self._at(other, step)) is not None}
            best_first = sorted(reached, key=reached.__getitem__, reverse=self.objective.direction == "max")
            if best_first.index(trial_id) >= max(1, len(reached) // self._factor):
                trial.status = "STOPPED"
        return trial

    def _at(self, trial: keras_tuner.engine.trial.Trial, step: int) -> float | None:
        if not trial.metrics.exists(self.objective.name):
            return None
        history = trial.metrics.get_history(self.objective.name)
        return next((each.mean() for each in history if each.step == step), None)


def rungs(min_epochs: int, max_epochs: int, factor: int) -> list[int]:
    """The epochs of each rung: `min_epochs`, `factor` times as many, …, `max_epochs`."""
    epochs, found = min_epochs, []
    while epochs < max_epochs:
        found.append(epochs)
        epochs *= factor
    return [*found, max_epochs]
