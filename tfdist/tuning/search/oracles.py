"""KerasTuner's oracles, as the sweep uses them: asked and told by one thread, with the journal as their only memory.

Invariant: an oracle that gets the same calls in the same order gives the same answers, and it writes no file. This
module, asha.py and median.py are all that imports KerasTuner's oracles; `search.py` imports them when one is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras_tuner
from keras_tuner import oracles

from tfdist.tuning.search.terms import Terms

UNLIMITED = 10**9


def common(terms: Terms) -> dict[str, Any]:
    """The arguments that all oracles take."""
    return {
        "objective": keras_tuner.Objective(terms.objective.name, terms.objective.direction),
        "hyperparameters": terms.hyperparameters,
        "seed": terms.seed + 1,  # KerasTuner takes 0 for none
        "allow_new_entries": terms.may_grow,
        "tune_new_entries": True,
        "max_consecutive_failed_trials": UNLIMITED,  # the sweep counts them
    }


class Journaled:
    """Takes the files and the printing out of an oracle, and makes its score the last value that was told."""

    objective: keras_tuner.Objective

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.verbose = 0

    def save(self) -> None:
        pass

    def _save_trial(self, trial: keras_tuner.engine.trial.Trial) -> None:
        pass

    def score_trial(self, trial: keras_tuner.engine.trial.Trial) -> None:
        last = trial.metrics.get_history(self.objective.name)[-1]
        trial.score, trial.best_step = last.mean(), last.step


class Random(Journaled, oracles.RandomSearchOracle):
    """Random search."""


class Bayesian(Journaled, oracles.BayesianOptimizationOracle):
    """Bayesian optimization that, where the process promises most for values that were tried, tries others."""

    def populate_space(self, trial_id: str) -> dict[str, Any]:
        answer = super().populate_space(trial_id)
        if answer["status"] != "RUNNING" or self._compute_values_hash(answer["values"]) not in self._tried_so_far:
            return answer
        values = self._random_values()
        return {"status": "STOPPED"} if values is None else {"status": "RUNNING", "values": values}


class Hyperband(Journaled, oracles.HyperbandOracle):
    """Hyperband."""


class Grid(Journaled, oracles.GridSearchOracle):
    """Grid search that does not wait for a trial to end before it names the next combination.

    KerasTuner's waits because a trial might reveal new parameters; a space of bindings is known from the start.
    """

    def populate_space(self, trial_id: str) -> dict[str, Any]:
        answer = super().populate_space(trial_id)
        if self.allow_new_entries:
            return answer
        if answer["status"] == "RUNNING" and trial_id not in self._populate_next:
            self._populate_next.append(trial_id)
        return answer


def learn(trial: keras_tuner.engine.trial.Trial, new: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
    """Adds to a trial what its model asked for besides, and the values that it got."""
    trial.hyperparameters.values.update(values)
    made = keras_tuner.HyperParameters.from_config({"space": list(new), "values": {}})
    trial.hyperparameters.merge(made, overwrite=False)
