"""The oracle, on a thread of its own: asked for values while trials run, told how they went.

Invariant: the oracle gets its calls one after the other in the order in which the chief made them, and `asked` counts
those that asked, answered with values or not. The same calls in the same order give the same values, so a chief that
is started again makes them again. Once the oracle had nothing to give it is not asked again before it was told more.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras_tuner

READY, STOPPED = "RUNNING", "STOPPED"


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A trial of the oracle: its name there, and values in its words."""

    name: str
    values: dict[str, Any]


class Asking:
    """The chief's conversation with an oracle.

    Args:
      oracle: of KerasTuner's interface.
      metric: the objective's name.
      wake: called from the thread whenever there is something new.
    """

    def __init__(self, oracle: keras_tuner.Oracle, metric: str, wake: Callable[[], None]) -> None:
        self._oracle = oracle
        self._metric = metric
        self._wake = wake
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ready: collections.deque[Suggestion] = collections.deque()
        self._to_stop: list[str] = []
        self._outstanding = 0
        self._has_none = False
        self.asked = 0
        self.is_over = False
        self._failure: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="tfdist-oracle", daemon=True)
        self._thread.start()

    def want(self, count: int) -> None:
        """Asks, if that may help, until `count` suggestions are there; one call at a time."""
        self._take_news()
        if not (self._outstanding or self._has_none or self.is_over or len(self._ready) >= count):
            self._ask()

    def ask_until(self, asked: int) -> None:
        """Asks as often as it takes to have asked so often in all, and waits for the answers."""
        while self.asked < asked:
            self._ask()
        self.settle()

    def settle(self) -> None:
        """Waits for the answers to all calls so far."""
        done = threading.Event()
        self._calls.put(done.set)
        while not done.wait(0.5):
            self._check_thread()
        self._take_news()

    def look(self) -> Suggestion | None:
        """The next suggestion, if there is one."""
        self._take_news()
        return self._ready[0] if self._ready else None

    def take(self) -> Suggestion | None:
        """The same, and it is not the next any more."""
        return self._ready.popleft() if self.look() else None

    def adopt(self, name: str, values: dict[str, Any]) -> None:
        """Puts values in the place of those that the oracle gave, where arithmetic differs between machines."""

        def call() -> None:
            self._oracle.get_trial(name).hyperparameters.values.update(values)

        self._calls.put(call)

    def report(self, name: str, value: float, epoch: int) -> None:
        """Tells an evaluation; `stopped` will say whether the oracle wants the trial to end."""

        def call() -> None:
            trial = self._oracle.update_trial(name, {self._metric: value}, step=epoch)
            if trial.status == STOPPED:
                trial.status = READY
                self._put(lambda: self._to_stop.append(name))

        self._calls.put(call)

    def stopped(self) -> list[str]:
        """The trials that the oracle wants to end, each once."""
        self._take_news()
        names, self._to_stop = self._to_stop, []
        return names

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
        """Tells the end of a trial, with its objective or without.

        Args:
          new: hyperparameters that its model asked for besides those known; `values` are those that they had.
        """

        def call() -> None:
            trial = self._oracle.get_trial(name)
            if new:
                from tfdist.tuning.search import oracles

                oracles.learn(trial, new, values or {})
            if value is not None:
                self._oracle.update_trial(name, {self._metric: value}, step=epoch)
            trial.status, trial.message = ("FAILED", message) if value is None else ("COMPLETED", None)
            self._oracle.end_trial(trial)
            self._put(self._ask_again)

        self._calls.put(call)

    def close(self) -> None:
        """Ends the thread, after the call that it is in: numerical code must not run while the interpreter ends."""
        self._is_closing = True
        self._calls.put(None)
        self._thread.join()

    def _ask(self) -> None:
        self.asked += 1
        self._outstanding += 1
        asker = f"ask-{self.asked}"

        def call() -> None:
            trial = self._oracle.create_trial(asker)
            self._put(lambda: self._answered(trial.status, Suggestion(trial.trial_id, trial.hyperparameters.values)))

        self._calls.put(call)

    def _answered(self, status: str, suggestion: Suggestion) -> None:
        self._outstanding -= 1
        if status == READY:
            self._ready.append(suggestion)
        self._has_none = status != READY
        self.is_over = status == STOPPED

    def _ask_again(self) -> None:
        self._has_none = False

    def _put(self, news: Callable[[], None]) -> None:
        self._news.put(news)
        self._wake()

    def _take_news(self) -> None:
        while not self._news.empty():
            self._news.get()()
        self._check_thread()

    def _check_thread(self) -> None:
        if not self._thread.is_alive() and self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while (call := self._calls.get()) is not None and not self._is_closing:
                call()
        except BaseException as error:  # raised where the chief looks next
            self._failure = error
            self._wake()
