"""Notes the signals that ask the launcher to end, from its first moment to its last.

Invariant: a handler notes and returns; nothing is interrupted and nothing raised, so a signal cannot strike at a bad
moment. Only a third Ctrl-C is the kernel's, for a launcher that is stuck: the workers die with it. Called by
`__main__.py` before its imports; `watch.py` and `supervisor.py` act on what was noted.
"""

from __future__ import annotations

import collections
import contextlib
import signal
import time
from collections.abc import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTED = (*ENDING, signal.SIGUSR1)  # which Slurm sends before a job's time is up
PROFILE = signal.SIGUSR2  # heartbeat.PROFILE_SIGNAL, which takes too long to import here
ONE_CTRL_C_SECONDS = 0.2  # timeout(1) signals its child, and then the process group that the child is in


def record_signals() -> collections.deque[int]:
    """Installs handlers that record signals in the returned deque; SIGHUP stays ignored under nohup.

    PROFILE is ignored, by workers too until they train.
    """
    noted: collections.deque[int] = collections.deque()
    counted: list[float] = []  # the moments of Ctrl-C

    def handle_signal(number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if counted and now - counted[-1] < ONE_CTRL_C_SECONDS:
                return
            counted.append(now)
            if len(counted) > 1:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        noted.append(number)

    for number in NOTED:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle_signal)
    signal.signal(PROFILE, signal.SIG_IGN)
    return noted


@contextlib.contextmanager
def recording_profile_signal() -> Iterator[collections.deque[int]]:
    """The moments at which a profile is asked for while the context lasts: PROFILE, each time that it comes."""
    noted: collections.deque[int] = collections.deque()
    before = signal.signal(PROFILE, lambda number, _frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(PROFILE, before)


def ignore_signals() -> None:
    """Ignores further signals, so that the process ends as it is about to."""
    for number in NOTED:
        signal.signal(number, signal.SIG_IGN)
