"""Watches the workers of one start: the first failure ends the others, a signal to the launcher reaches all.

Invariant: `watch` returns only when every worker has ended, and names the one whose failure was the cause. A worker
that merely lost its peers (status 4, or the SIGABRT with which TensorFlow answers a dead peer) is not taken for the
cause while another may be; nor is one that ended because it was told to.

Called by `__main__.py`, once a start.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Sequence

from tfdist.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_PEER_LOST, EXIT_PREEMPTED, EXIT_USER_ERROR
from tfdist.launch.processes import Worker

EXIT_TIMED_OUT = 124  # as timeout(1)
POLL_SECONDS = 0.05
SYMPTOMS = (EXIT_PEER_LOST, 128 + signal.SIGABRT)
ENDED_AS_ASKED = (EXIT_PREEMPTED, 128 + signal.SIGINT)
OWN_DOING = (EXIT_USER_ERROR, EXIT_DIVERGED)  # no worker ends like this because of a signal or a lost peer


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long the supervision waits for what.

    Attributes:
      settle_seconds: for the cause, when a worker lost its peers.
      grace_seconds: between SIGTERM and SIGKILL to the survivors of a failure.
      save_seconds: for the others to save, after the first worker ended as it was asked to, or was preempted.
      timeout_seconds: for the whole start; None is without limit.
    """

    settle_seconds: float = 2.0
    grace_seconds: float = 5.0
    save_seconds: float = 300.0
    timeout_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a worker ended. `was_told`: after this launcher had signalled it because of another's failure."""

    worker: int
    status: int
    sweep: int
    was_told: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The status of the whole, the worker that it comes from (None when all is well or time was up), all endings."""

    status: int
    worker: int | None
    endings: tuple[Ending, ...]


def watch(
    workers: Sequence[Worker],
    *,
    signals: collections.deque[int],
    say: Callable[[str], None],
    patience: Patience = Patience(),
) -> Outcome:
    """Returns when all workers have ended.

    Args:
      signals: SIGINT, SIGTERM and SIGUSR1 received by the launcher, appended by its handlers; they are passed on. A
        second SIGINT kills.
      say: is told what is done and why.
    """
    return _Watch(workers, signals, say, patience).run()


def blame(endings: Sequence[Ending]) -> Ending | None:
    """The ending that the others follow from; None when nobody failed."""
    failures = [e for e in endings if e.status != EXIT_DONE]
    own = [e for e in failures if not e.was_told or e.status in OWN_DOING]
    return min(own or failures, key=_order_of_blame, default=None)


def _order_of_blame(ending: Ending) -> tuple[bool, bool, int, bool, int]:
    is_symptom = ending.status in SYMPTOMS
    was_asked = ending.status in ENDED_AS_ASKED
    return is_symptom, was_asked, ending.sweep, ending.status not in OWN_DOING, ending.worker


def describe(status: int) -> str:
    """A status in words: "status 2", "status 137 (SIGKILL)"."""
    if status == EXIT_PREEMPTED:
        return f"status {status} (preempted, or SIGTERM)"
    if 128 < status < 128 + signal.NSIG and status - 128 in set(signal.Signals):
        return f"status {status} ({signal.Signals(status - 128).name})"
    return f"status {status}"


class _Watch:
    def __init__(
        self, workers: Sequence[Worker], signals: collections.deque[int], say: Callable[[str], None], patience: Patience
    ) -> None:
        self.running = list(workers)
        self.signals = signals
        self.say = say
        self.patience = patience
        self.endings: list[Ending] = []
        self.sweep = 0
        self.was_interrupted = False  # the workers were asked to save and end
        self.is_ending = False  # the survivors of a failure were told to end
        self.timed_out = False
        self.end_at = self.kill_at = math.inf
        self.time_is_up_at = time.monotonic() + (patience.timeout_seconds or math.inf)

    def run(self) -> Outcome:
        while self.running:
            self._pass_on_signals()
            self._collect()
            self._act(time.monotonic())
            if self.running:
                time.sleep(POLL_SECONDS)
        cause = blame(self.endings)
        status = EXIT_TIMED_OUT if self.timed_out else cause.status if cause else EXIT_DONE
        return Outcome(status, cause.worker if cause and not self.timed_out else None, tuple(self.endings))

    def _pass_on_signals(self) -> None:
        while self.signals:
            number = self.signals.popleft()
            kill = number == signal.SIGINT and self.was_interrupted
            self.say("Killing the workers." if kill else f"Passing {signal.Signals(number).name} on to the workers.")
            self._send_all(signal.SIGKILL if kill else number)
            self.was_interrupted = True

    def _collect(self) -> None:
        self.sweep += 1
        for worker in list(self.running):
            status = worker.poll()
            if status is not None:
                self.running.remove(worker)
                self.endings.append(Ending(worker.index, status, self.sweep, self.is_ending))
                if status != EXIT_DONE and not self.is_ending:
                    self._plan_after(self.endings[-1])

    def _plan_after(self, ending: Ending) -> None:
        """Decides what a worker's failure means for the others."""
        now = time.monotonic()
        if self.was_interrupted and ending.status in ENDED_AS_ASKED + SYMPTOMS:
            self.kill_at = min(self.kill_at, now + self.patience.save_seconds)
            return
        if ending.status == EXIT_PREEMPTED and self.running:
            self.say(f"worker {ending.worker} ended with {describe(ending.status)}; asking the others to save and end.")
            self._send_all(signal.SIGTERM)
            self.was_interrupted = True
            self.kill_at = now + self.patience.save_seconds
            return
        settle = self.patience.settle_seconds if ending.status in SYMPTOMS else 0.0
        self.end_at = min(self.end_at, now + settle)

    def _act(self, now: float) -> None:
        if now >= self.time_is_up_at and not self.is_ending and self.running:
            self.timed_out = True
            self.end_at = now
            self.say(f"The time of {self.patience.timeout_seconds:g} s is up; ending the workers.")
        if now >= self.end_at and not self.is_ending:
            self._end_survivors(now)
        if now >= self.kill_at and self.running:
            self.say(f"Killing {_names(self.running)}: not ended by SIGTERM in time.")
            self._send_all(signal.SIGKILL)
            self.kill_at = math.inf

    def _end_survivors(self, now: float) -> None:
        cause = blame(self.endings)
        if cause and self.running:
            self.say(f"worker {cause.worker} ended with {describe(cause.status)}; ending {_names(self.running)}.")
        self.is_ending = True
        self.kill_at = now + self.patience.grace_seconds
        self._send_all(signal.SIGTERM)

    def _send_all(self, signal_number: int) -> None:
        for worker in self.running:
            worker.send(signal_number)


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(f"worker {worker.index}" for worker in workers)
