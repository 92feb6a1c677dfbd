"""Leaves the processors to training: the writer's thread computes for a share of the time, and rests between.

A checkpoint that is not committed when the run fails is lost with the time since its copy. The share is so large that
a write, with the time for which it waits for the disk or a processor, takes no more than 1 % of the time between
failures, which is what that loss then costs, and at least 5 % of the machine.

Invariant: resting never delays anybody who waits for the writer: it ends at once when the writer is hurried. The
writer's thread rests between pieces of what it writes.
"""

from __future__ import annotations

import os
import threading
import time

SHARE_OF_MACHINE = 0.05
LONGEST_WRITE = 0.01  # of the mean time between failures
FIRST_SECONDS_PER_BYTE = 3e-9  # without rests, until a write was measured
_SHORTEST_SECONDS = 0.001  # of computing, before a rest is worth its switch of threads


class Throttle:
    """The rests of one thread.

    Args:
      mean_seconds_between_failures: of the run.
      share: of one processor that the thread may use at least; None takes 5 % of all that this process may use.
    """

    def __init__(self, mean_seconds_between_failures: float, share: float | None = None) -> None:
        self._longest_seconds = LONGEST_WRITE * mean_seconds_between_failures
        self._least = min(1.0, SHARE_OF_MACHINE * len(os.sched_getaffinity(0)) if share is None else share)
        self._computing_per_byte = self._working_per_byte = FIRST_SECONDS_PER_BYTE
        self._hurried = threading.Event()
        self._begun = self._began_computing = self._computed = 0.0
        self.share = self._least
        self.rested_seconds = 0.0

    def begin(self, num_bytes: int) -> None:
        """From here on the thread's computing counts, for a write of so many bytes; called by the thread."""
        computing = num_bytes * self._computing_per_byte
        may_rest = max(0.0, self._longest_seconds - num_bytes * self._working_per_byte)
        self.share = max(self._least, computing / (computing + may_rest)) if computing else self._least
        self._begun = time.perf_counter()
        self._began_computing = self._computed = time.thread_time()
        self.rested_seconds = 0.0

    def end(self, num_bytes: int) -> None:
        """They are written; called by the thread."""
        if num_bytes:
            self._computing_per_byte = (time.thread_time() - self._began_computing) / num_bytes
            self._working_per_byte = (time.perf_counter() - self._begun - self.rested_seconds) / num_bytes

    def rest(self) -> None:
        """Rests as long as what was computed since the last rest asks for; called by the thread."""
        computed = time.thread_time() - self._computed
        if self.share == 1.0 or computed < _SHORTEST_SECONDS:
            return
        begun = time.perf_counter()
        self._hurried.wait(computed * (1 / self.share - 1))
        self.rested_seconds += time.perf_counter() - begun
        self._computed = time.thread_time()

    def hurry(self) -> None:
        """No rests from now on: somebody waits."""
        self._hurried.set()

    def take_time(self) -> None:
        """Rests again."""
        self._hurried.clear()
