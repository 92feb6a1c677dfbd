"""The scheduler's conversation with an oracle: asks for values, reports how their trials went.

Invariant: `asked` counts the calls that asked for values, answered with values or not. The same calls in the same order
give the same values, so a chief that is started again makes them again. An oracle that had nothing to give is not asked
again before a trial has ended.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras_tuner

READY, STOPPED = "RUNNING", "STOPPED"


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A trial of the oracle: its name there, and values in its words."""

    name: str
    values: dict[str, Any]


class OracleClient:
    """Asks an oracle of KerasTuner's interface, which reads the objective under the name `metric`."""

    def __init__(self, oracle: keras_tuner.Oracle, metric: str) -> None:
        self._oracle = oracle
        self._metric = metric
        self._ready: collections.deque[Suggestion] = collections.deque()
        self._has_none = False
        self.asked = 0
        self.is_over = False

    def take(self) -> Suggestion | None:
        """The next suggestion; None where the oracle has none before a trial ends."""
        if not (self._ready or self._has_none or self.is_over):
            self._ask()
        return self._ready.popleft() if self._ready else None

    def replay(self, asked: int) -> None:
        """Asks as often as it takes to have asked so often in all; `take` gives the answers later."""
        while self.asked < asked:
            self._ask()

    def override(self, name: str, values: dict[str, Any]) -> None:
        """Puts values in the place of those that the oracle gave, where arithmetic differs between machines."""
        self._oracle.get_trial(name).hyperparameters.values.update(values)

    def report(self, name: str, value: float, epoch: int) -> bool:
        """Reports an evaluation; whether the oracle wants the trial to end."""
        trial = self._oracle.update_trial(name, {self._metric: value}, step=epoch)
        is_to_end = trial.status == STOPPED
        if is_to_end:
            trial.status = READY
        return is_to_end

    def end(
        self,
        name: str,
        value: float | None,
        epoch: int,
        message: str,
        *,
        new: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """Reports the end of a trial, with its objective or without.

        Args:
          new: hyperparameters that its model asked for besides those known; `values` are those that they had.
        """
        trial = self._oracle.get_trial(name)
        if new:
            from tfdist.tuning.search import oracles

            oracles.learn(trial, new, values or {})
        if value is not None:
            self._oracle.update_trial(name, {self._metric: value}, step=epoch)
        trial.status, trial.message = ("FAILED", message) if value is None else ("COMPLETED", None)
        self._oracle.end_trial(trial)
        self._has_none = False

    def _ask(self) -> None:
        self.asked += 1
        trial = self._oracle.create_trial(f"ask-{self.asked}")
        if trial.status == READY:
            self._ready.append(Suggestion(trial.trial_id, trial.hyperparameters.values))
        self._has_none = trial.status != READY
        self.is_over = trial.status == STOPPED
