"""KerasTuner's oracles, as the sweep uses them: called by one thread, with the journal as their only memory.

Invariant: an oracle that gets the same calls in the same order gives the same answers, and it writes no file. Those
that stop trials answer `update_trial` with the status STOPPED for a trial that should end, and only then. The classes
bear the names of those in `search.py`, which imports this module, and KerasTuner with it, when one is chosen.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import keras_tuner
from keras_tuner import oracles
from keras_tuner.engine import hyperparameters
from keras_tuner.engine.trial import Trial

UNLIMITED = 10**9


@dataclasses.dataclass
class OracleClient:
    """Asks an oracle, which reads the objective under the name `metric`, for trials, and reports how they went.

    `num_requests` counts the requests for values, answered with values or not. A sweep that is started again makes the
    same calls in the same order. An oracle that had nothing to give is not asked again before a trial has ended.
    """

    oracle: keras_tuner.Oracle
    metric: str
    num_requests: int = 0
    is_over: bool = False
    _ready: collections.deque[Trial] = dataclasses.field(default_factory=collections.deque)
    _has_none: bool = False

    def take(self) -> Trial | None:
        """The next trial; None where the oracle has none before another ends."""
        if not (self._ready or self._has_none or self.is_over):
            self._request()
        return self._ready.popleft() if self._ready else None

    def replay(self, num_requests: int) -> None:
        """Asks as often as it takes to have asked so often in all; `take` gives the answers later."""
        while self.num_requests < num_requests:
            self._request()

    def report(self, name: str, value: float, epoch: int) -> bool:
        """Reports an evaluation; whether the oracle wants the trial to end."""
        trial = self.oracle.update_trial(name, {self.metric: value}, step=epoch)
        is_to_end = trial.status == "STOPPED"
        if is_to_end:
            trial.status = "RUNNING"
        return is_to_end

    def end(
        self,
        name: str,
        value: float | None,
        epoch: int,
        message: str,
        new: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any],
    ) -> None:
        """Reports the end of a trial, with its objective or without.

        Args:
          new: hyperparameters that its model asked for besides those known; `values` are those that they had.
        """
        trial = self.oracle.get_trial(name)
        if new:
            trial.hyperparameters.values.update(values)
            made = keras_tuner.HyperParameters.from_config({"space": list(new), "values": {}})
            trial.hyperparameters.merge(made, overwrite=False)
        if value is not None:
            self.oracle.update_trial(name, {self.metric: value}, step=epoch)
        trial.status, trial.message = ("FAILED", message) if value is None else ("COMPLETED", None)
        self.oracle.end_trial(trial)
        self._has_none = False

    def _request(self) -> None:
        self.num_requests += 1
        trial = self.oracle.create_trial(f"ask-{self.num_requests}")
        if trial.status == "RUNNING":
            self._ready.append(trial)
        self._has_none = trial.status != "RUNNING"
        self.is_over = trial.status == "STOPPED"


class JournaledOracle:
    """Takes the files and the printing out of an oracle, and makes its score the last value that was told."""

    objective: keras_tuner.Objective

    def __init__(self, **arguments: Any) -> None:
        arguments |= {"tune_new_entries": True, "max_consecutive_failed_trials": UNLIMITED}  # the sweep counts them
        super().__init__(**arguments)
        self.verbose = 0

    def save(self) -> None:
        """Does nothing: the journal has all that a resumed sweep needs."""

    def _save_trial(self, trial: Trial) -> None:
        pass

    def score_trial(self, trial: Trial) -> None:
        """Sets the score of a trial to the objective's last value."""
        last = trial.metrics.get_history(self.objective.name)[-1]
        trial.score, trial.best_step = last.value[-1], last.step


class RandomOracle(JournaledOracle, oracles.RandomSearchOracle):
    """KerasTuner's random search."""


class BayesianOracle(JournaledOracle, oracles.BayesianOptimizationOracle):
    """Bayesian optimization that, where the process promises most for values that were tried, tries others."""

    def populate_space(self, trial_id: str) -> dict[str, Any]:
        answer = super().populate_space(trial_id)
        if answer["status"] != "RUNNING" or self._compute_values_hash(answer["values"]) not in self._tried_so_far:
            return answer
        values = self._random_values()
        return {"status": "STOPPED"} if values is None else {"status": "RUNNING", "values": values}


class HyperbandOracle(JournaledOracle, oracles.HyperbandOracle):
    """KerasTuner's Hyperband."""

    def __init__(self, *, iterations: int, **arguments: Any) -> None:
        super().__init__(hyperband_iterations=iterations, **arguments)


class GridOracle(JournaledOracle, oracles.GridSearchOracle):
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


class _Stopping(RandomOracle):
    """Random values, and a trial ends early where `_is_poor` says so."""

    @keras_tuner.synchronized
    def update_trial(self, trial_id: str, metrics: dict[str, float], step: int = 0) -> Trial:
        trial = super().update_trial(trial_id, metrics, step)
        if self._is_poor(trial, step):
            trial.status = "STOPPED"
        return trial

    def _is_poor(self, trial: Trial, step: int) -> bool:
        """Whether a trial should end at an epoch."""
        raise NotImplementedError

    def _costs(self, trial: Trial) -> dict[int, float]:
        """A trial's reports as costs, by epoch: less is better, and what is not a number is the worst."""
        if not trial.metrics.exists(self.objective.name):
            return {}
        sign = -1.0 if self.objective.direction == "max" else 1.0
        values = {each.step: each.value[-1] for each in trial.metrics.get_history(self.objective.name)}
        return {step: sign * value if math.isfinite(value) else math.inf for step, value in values.items()}


class AshaOracle(_Stopping):
    """Stops a trial at a rung unless it is among the best of those that got there before.

    Of n trials with a value at the rung, its own included, ⌊n ÷ factor⌋ continue, and at least the best.
    """

    def __init__(self, *, max_epochs: int, min_epochs: int, factor: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._factor = factor
        rungs = (min_epochs * factor**number for number in itertools.count())
        self._rungs = set(itertools.takewhile(lambda epochs: epochs < max_epochs, rungs))

    def _is_poor(self, trial: Trial, step: int) -> bool:
        if step not in self._rungs:
            return False
        reached = {name: self._costs(other) for name, other in self.trials.items()}
        cost = {name: costs[step] for name, costs in reached.items() if step in costs}
        return sorted(cost, key=cost.__getitem__).index(trial.trial_id) >= max(1, len(cost) // self._factor)


class MedianOracle(_Stopping):
    """Stops a trial whose best cost so far is above the median of the mean costs of the finished ones by that epoch."""

    def __init__(self, *, min_trials: int, min_epochs: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._min_trials, self._min_epochs = min_trials, min_epochs

    def _is_poor(self, trial: Trial, step: int) -> bool:
        finished = [other for other in self.trials.values() if other.status == "COMPLETED"]
        means = [statistics.fmean(costs) for other in finished if (costs := self._costs_until(other, step))]
        own = self._costs_until(trial, step)
        if step < self._min_epochs or len(means) < self._min_trials or not own:
            return False
        return min(own) > statistics.median(means)

    def _costs_until(self, trial: Trial, last_step: int) -> list[float]:
        return [cost for step, cost in self._costs(trial).items() if step <= last_step and cost < math.inf]


class OptunaOracle(_Stopping):
    """A study of Optuna in memory, which the journal's calls make again; so Optuna stores nothing.

    A range that Optuna has no distribution for is searched by the share of it that lies below a value.
    """

    def __init__(self, *, sampler: Any, pruner: Any, **arguments: Any) -> None:
        super().__init__(**arguments)
        import optuna

        goal = optuna.study.StudyDirection[f"{self.objective.direction}imize".upper()]
        # One name, since some pruners draw by it.
        self._study = optuna.create_study(study_name="tfdist", direction=goal, sampler=sampler, pruner=pruner)
        self._asked: dict[str, Any] = {}  # Optuna's trials by the names of KerasTuner's
        self._poor: set[str] = set()

    def populate_space(self, trial_id: str) -> dict[str, Any]:
        asked = self._asked[trial_id] = self._study.ask()
        chosen = keras_tuner.HyperParameters()
        for each in self.hyperparameters.space:
            chosen.merge([each])
            if chosen.is_active(each):
                chosen.values[each.name] = self._suggest(asked, each)
        return {"status": "RUNNING", "values": chosen.values}

    def _suggest(self, asked: Any, each: Any) -> Any:
        """Has Optuna choose a value of a HyperParameter."""
        if isinstance(each, hyperparameters.Fixed):
            return each.value
        if isinstance(each, hyperparameters.Choice | hyperparameters.Boolean):
            return asked.suggest_categorical(each.name, list(each.values))
        is_whole, is_log = isinstance(each, hyperparameters.Int), each.sampling == "log"
        has_steps = each.step not in (None, 1) if is_whole else each.step is not None
        if each.sampling == "reverse_log" or (is_log and has_steps):
            return each.prob_to_value(asked.suggest_float(each.name, 0.0, 1.0))
        if is_whole:
            return asked.suggest_int(each.name, each.min_value, each.max_value, step=each.step or 1, log=is_log)
        return asked.suggest_float(each.name, each.min_value, each.max_value, step=each.step, log=is_log)

    def _is_poor(self, trial: Trial, step: int) -> bool:
        asked = self._asked[trial.trial_id]
        asked.report(trial.metrics.get_history(self.objective.name)[-1].value[-1], step)
        if asked.should_prune():
            self._poor.add(trial.trial_id)
        return trial.trial_id in self._poor

    @keras_tuner.synchronized
    def end_trial(self, trial: Trial) -> None:
        """Tells Optuna how a trial ended: with its score, stopped as poor, or without."""
        super().end_trial(trial)
        states = type(self._study.trials[0].state)
        if trial.status != "COMPLETED" or not math.isfinite(trial.score):
            self._study.tell(self._asked[trial.trial_id], state=states.FAIL)
        elif trial.trial_id in self._poor:
            self._study.tell(self._asked[trial.trial_id], state=states.PRUNED)
        else:
            self._study.tell(self._asked[trial.trial_id], trial.score)
