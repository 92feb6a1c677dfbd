"""Whether workers are started again after a failure, when, and which of them.

Invariant: what more of the same cannot mend ends the run: wrong input, a training that diverged, a number of failures
in a row that brought no new step. An outage of a store ends by itself, so it is waited for, and no worker is left out
for it. Holds no process; `supervisor.py` asks after each start.
"""

from __future__ import annotations

import dataclasses

from tfdist.errors import (
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NOT_SAVED,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
    EXIT_STORE_UNAVAILABLE,
    EXIT_USER_ERROR,
)
from tfdist.launch.plan import Slot

FINAL = (EXIT_DONE, EXIT_USER_ERROR, EXIT_DIVERGED, EXIT_PREEMPTED, EXIT_NOT_SAVED, EXIT_INTERRUPTED)
FRUITLESS_FAILURES = 3  # in a row, before the breaker opens
LONGEST_BACKOFF_SECONDS = 60.0
HALF_OPENS_AFTER, MOST_OPEN_SECONDS = 60.0, 120.0  # the breaker, for one start: in times of the first back-off
FIRST_SIGNAL = 128  # statuses from here on are of processes that a signal ended
STRIKES = 2  # failures of one worker without a new step, after which it is left out


@dataclasses.dataclass(frozen=True)
class Restart:
    """Continue `seconds` after the failure; at once where the last start came to new steps.

    Attributes:
      number: of the restart, counted from 1.
      seconds: to wait.
      left_out: the slots that are not started.
    """

    number: int
    seconds: float
    left_out: frozenset[Slot]


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """Do not start again; `reason` is a sentence, and `event` its name in events.jsonl. None: nothing to say."""

    event: str | None = None
    reason: str = ""


@dataclasses.dataclass
class Restarts:
    """The account of one run's failures.

    Attributes:
      num_workers: that there would be with those that are left out.
      max_restarts: in all; 0 starts once.
      min_workers: how many are enough to continue; None: all.
      backoff_seconds: before a restart after a failure without a new step; doubled after each further one.
      is_asked: for restarts; else what a process ends with by itself before the first step is final.
      newest_step: the highest that any start has done.
    """

    num_workers: int
    max_restarts: int
    min_workers: int | None = None
    backoff_seconds: float = 2.0
    is_asked: bool = True
    newest_step: int = 0
    _number: int = 0
    _fruitless: int = 0
    _outages: int = 0
    _strikes: dict[Slot, int] = dataclasses.field(default_factory=dict)
    _left_out: frozenset[Slot] = frozenset()

    def decide(
        self, status: int, slot: Slot | None, step: int | None, *, is_retryable: bool = False
    ) -> Restart | GiveUp:
        """Decides what follows from the failure of a start.

        Args:
          status: of the start.
          slot: of the worker that was the cause; None where nobody knows.
          step: the last one that this start has done; None where none was shown.
          is_retryable: another start may do better although the status is the user's (a port that was taken since).
        """
        is_fruitful = step is not None and step > self.newest_step
        self.newest_step = max(self.newest_step, step or 0)
        is_outage = status == EXIT_STORE_UNAVAILABLE
        self._outages = (0 if is_fruitful else self._outages) + 1 if is_outage else 0
        self._fruitless = 0 if is_fruitful else self._fruitless + (not is_outage)
        if is_fruitful:  # those that are left out get one more chance
            self._strikes = dict.fromkeys(self._left_out, STRIKES - 1)
        elif slot is not None and not is_outage:
            self._strikes[slot] = self._strikes.get(slot, 0) + 1
        is_own = status < FIRST_SIGNAL and status != EXIT_PEER_LOST and not is_outage
        is_final = status in FINAL or (is_own and not self.newest_step and not self.is_asked)
        if (is_final and not is_retryable) or not self.max_restarts:
            return GiveUp()
        if self._number >= self.max_restarts:
            return GiveUp(
                "restarts_used_up",
                f"Not starting again: the {self.max_restarts} restarts of --max_restarts are used up.",
            )
        if self._fruitless > FRUITLESS_FAILURES:
            at = f"step {self.newest_step:,} was the last" if self.newest_step else "there was no step at all"
            return GiveUp(
                "breaker_opened",
                f"Not starting again: {self._fruitless} failures in a row brought no new step ({at}). What it is "
                "stands above; the same command resumes it once it is mended.",
            )
        self._number += 1
        self._left_out = self._choose(is_fruitful)
        waits = self._fruitless + self._outages
        seconds = min(self.backoff_seconds * 2.0 ** (waits - 1) if waits else 0.0, LONGEST_BACKOFF_SECONDS)
        if self._fruitless == FRUITLESS_FAILURES:
            seconds = min(self.backoff_seconds * HALF_OPENS_AFTER, MOST_OPEN_SECONDS)
        return Restart(self._number, seconds, self._left_out)

    def _choose(self, is_fruitful: bool) -> frozenset[Slot]:
        least = self.min_workers or self.num_workers
        kept = set() if is_fruitful else set(self._left_out)
        for slot, strikes in self._strikes.items():
            if strikes >= STRIKES and self.num_workers - len(kept | {slot}) >= least:
                kept.add(slot)
        return frozenset(kept)
