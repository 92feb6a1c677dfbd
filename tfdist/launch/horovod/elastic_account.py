"""How often an elastic worker has failed, and when that is enough.

Invariant: a run that comes to no new step ends, and a worker that keeps failing by itself is left out before, so that
the others can continue. Holds no process; `elastic_worker.py` asks after each round.
"""

from __future__ import annotations

from tfdist.launch.horovod.elastic_driver import Place
from tfdist.launch.horovod.elastic_round import Ending
from tfdist.launch.supervise.restarts import FRUITLESS_FAILURES, STRIKES

WINDOW_SECONDS = 3600.0


class Account:
    """The rounds of one slot.

    Args:
      max_failures: of this worker itself within WINDOW_SECONDS, however much was trained between them.
    """

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._newest_step = 0
        self._fruitless = 0  # failures in a row without a new step, whoever was the cause
        self._strikes = 0  # those of this worker itself
        self._failures: list[float] = []  # when it failed by itself

    def enough(self, place: Place, ending: Ending, now: float) -> str | None:
        """Why there should be no other round after this one, as a clause; None: there may be.

        Args:
          place: of the slot in the round.
          ending: of its child.
          now: seconds, of any clock.
        """
        if (ending.step or 0) > self._newest_step:
            self._newest_step = ending.step or 0
            self._fruitless = self._strikes = 0
        elif ending.is_failure:
            self._fruitless += 1
            self._strikes += ending.is_own_failure
        if ending.is_own_failure:
            self._failures = [moment for moment in self._failures if now - moment < WINDOW_SECONDS] + [now]
        if len(self._failures) > self._max_failures and ending.is_own_failure:
            return f"{len(self._failures)} failures within an hour are more than --max_failures={self._max_failures}"
        if self._strikes >= STRIKES and place.size > 1:
            return f"it failed {self._strikes} times in a row without a new step"
        if self._fruitless >= FRUITLESS_FAILURES:
            return f"{self._fruitless} failures in a row brought no new step (the last one is {self._newest_step:,})"
        return None
