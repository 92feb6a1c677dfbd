"""Leaves the processors to training: the writer's thread computes for a small share of the time, and rests between.

Invariant: resting never delays anybody who waits for the writer: it ends at once when the writer is hurried. The
writer's thread rests between pieces of what it writes.
"""

from __future__ import annotations

import os
import threading
import time

SHARE_OF_MACHINE = 0.05
_SHORTEST_SECONDS = 0.001  # of computing, before a rest is worth its switch of threads


class Throttle:
    """The rests of one thread.

    Args:
      share: of one processor that the thread may use; None takes 5 % of all that this process may use.
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = min(1.0, SHARE_OF_MACHINE * len(os.sched_getaffinity(0)) if share is None else share)
        self._hurried = threading.Event()
        self._computed = 0.0
        self.rested_seconds = 0.0

    def begin(self) -> None:
        """From here on the thread's computing counts; called by the thread."""
        self._computed = time.thread_time()
        self.rested_seconds = 0.0

    def rest(self) -> None:
        """Rests as long as what was computed since the last rest asks for; called by the thread."""
        computed = time.thread_time() - self._computed
        if self._share == 1.0 or computed < _SHORTEST_SECONDS:
            return
        begun = time.perf_counter()
        self._hurried.wait(computed * (1 / self._share - 1))
        self.rested_seconds += time.perf_counter() - begun
        self._computed = time.thread_time()

    def hurry(self) -> None:
        """No rests from now on: somebody waits."""
        self._hurried.set()

    def take_time(self) -> None:
        """Rests again."""
        self._hurried.clear()
