"""Where a process's wall clock went, without gaps.

Invariant: the shares add up to all the time since the account began, because each moment belongs to the phase that the
process is in, and `heartbeat.beat` says where one phase ends and the next begins. A call of steps is divided further,
by what it measured of its waiting. A process has one account; the sampler reads it from another thread.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class PhaseKind:
    """A kind of phase of a process.

    Attributes:
      activity: what a supervisor says that it does.
      meaning: what the account counts for it.
      is_span: whether sinks hear when it ends.
    """

    activity: str
    meaning: str
    is_span: bool = False


# In the order in which a report stacks them.
PHASES = {
    "import": PhaseKind("starting", "starting Python, importing, reading the configuration", is_span=True),
    "connect": PhaseKind("connecting", "meeting the other workers", is_span=True),
    "data": PhaseKind("preparing data", "opening data sets", is_span=True),
    "build": PhaseKind("building the model", "building the model, tracing, compiling", is_span=True),
    "restore": PhaseKind("restoring", "reading a checkpoint", is_span=True),
    "compute": PhaseKind("training", "calls of steps, but for their waiting"),
    "input_wait": PhaseKind("waiting for input", "calls of steps that waited for a batch"),
    "peer_wait": PhaseKind(
        "agreeing with the others", "calls of steps, and agreements between them, that waited for other workers"
    ),
    "callbacks": PhaseKind("between steps", "between calls of steps: callbacks, logging, the loop itself"),
    "evaluate": PhaseKind("evaluating", "evaluations", is_span=True),
    "checkpoint": PhaseKind("saving", "stalls by checkpoints", is_span=True),
    "finish": PhaseKind("finishing", "the end: exporting, closing"),
    "leave": PhaseKind("leaving", "after an error, or when all is done"),
}
SHARES = {name: phase.meaning for name, phase in PHASES.items()}
FIRST = next(iter(SHARES))


class TimeAccount:
    """The seconds of each share since a moment of `time.monotonic`; None: now."""

    def __init__(self, since: float | None = None) -> None:
        self.id = uuid.uuid4().hex  # by which samples of one process are known
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(SHARES, 0.0)
        self._share = FIRST
        self._since = self._entered = time.monotonic() if since is None else since
        self._listener: Callable[[str, float, float], None] | None = None
        self.step: int | None = None

    def enter(self, share: str, step: int | None = None) -> None:
        """Counts time for `share` from now on; `step`: the run's steps that are done, where that has changed."""
        with self._lock:
            self._count()
            left, self._share = self._share, share
            if step is not None:
                self.step = step
            if left == share:
                return
            seconds, self._entered = self._since - self._entered, self._since
        if self._listener is not None and PHASES[left].is_span:
            self._listener(left, seconds, 0.0)

    def listen(self, listener: Callable[[str, float, float], None]) -> None:
        """Tells each span of PHASES when it ends: its share, its seconds, and how long ago that was.

        Those that are over are told at once, one after the other as SHARES has them.
        """
        with self._lock:
            self._count()
            over = [(share, self._seconds[share]) for share in SHARES if PHASES[share].is_span and share != self._share]
            ago = self._since - self._entered + sum(seconds for _, seconds in over)
        for share, seconds in over:
            ago -= seconds
            if seconds:
                listener(share, seconds, ago)
        self._listener = listener

    def move(self, seconds: float, source: str, target: str) -> None:
        """Counts for `target` what was counted for `source`, as far as there is so much. NaN counts nothing."""
        with self._lock:
            self._count()
            moved = min(seconds, self._seconds[source]) if seconds > 0 else 0.0
            self._seconds[source] -= moved
            self._seconds[target] += moved
        if self._listener is not None and PHASES[target].is_span:
            self._listener(target, moved, 0.0)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each share up to now."""
        with self._lock:
            self._count()
            return dict(self._seconds)

    def _count(self) -> None:
        now = time.monotonic()
        self._seconds[self._share] += now - self._since
        self._since = now


_account = TimeAccount()
_is_first = True  # of what this process does
_is_fresh = False  # begun for a run that has not begun


def current() -> TimeAccount:
    """Returns this process's account."""
    return _account


def begin(since: float | None = None) -> None:
    """Begins a new one: the command's, since its process exists."""
    global _account, _is_fresh
    _account, _is_fresh = TimeAccount(since), True


def begin_with_process() -> None:
    """Begins this process's account at the process's start, or now if an account has begun before."""
    global _is_first
    begin(time.monotonic() - _process_age() if _is_first else None)
    _is_first = False


def _process_age() -> float:
    """Seconds since this process exists, to a hundredth (psutil has whole ones); 0 where the system is not Linux."""
    try:
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / os.sysconf("SC_CLK_TCK")  # starttime, proc(5)


def begin_run() -> None:
    """A run begins: with the command's account, or, in a process that does more than this run, with a new one."""
    global _is_fresh
    if not _is_fresh:
        begin()
    _is_fresh = False


def _begin_after_fork() -> None:
    global _is_first
    begin()
    _is_first = True


os.register_at_fork(after_in_child=_begin_after_fork)
