"""What befalls a process from within: its clock jumps, it forks a child that outlives it. Imports no Keras.

`faults.py` decides when. A process whose environment names a directory in SITE says there that it listens.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import os
import pathlib
import signal
import time
from typing import Any

SITE = "TFDIST_CRASH_SITE"  # in the environment: a directory; without it nothing is changed
CLOCK = "clock"  # a file there with the seconds that the clock is ahead
FORK = signal.SIGRTMIN
LISTENS, FORKED = "listens-", "forked-"  # beginnings of names, which process ids follow
LIFE_SECONDS = 120.0  # of a child that nobody ends


def set_clock(site: pathlib.Path, seconds: float) -> None:
    """Has the processes that know `site` take the time for another; in one write, as they may read at any moment."""
    clock = os.open(site / CLOCK, os.O_WRONLY | os.O_CREAT)
    os.pwrite(clock, f"{seconds:<32}".encode(), 0)
    os.close(clock)


def install() -> None:
    """Lets the file shift the times of day that Python tells, and the signal fork."""
    site = os.environ.get(SITE)
    if not site or os.path.exists(f"{site}/{LISTENS}{os.getpid()}"):
        return
    clock = os.open(f"{site}/{CLOCK}", os.O_RDONLY | os.O_CLOEXEC)
    seconds, nanoseconds, now = time.time, time.time_ns, datetime.datetime.now

    def shift() -> float:
        return float(os.pread(clock, 32, 0))

    def shifted_now(cls: type, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return now(tz) + datetime.timedelta(seconds=shift())

    time.time = lambda: seconds() + shift()
    time.time_ns = lambda: nanoseconds() + int(shift() * 1e9)
    (methods,) = gc.get_referents(datetime.datetime.__dict__)  # a type of C's can be changed only there
    methods["now"] = classmethod(shifted_now)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
    signal.signal(FORK, _fork)
    pathlib.Path(site, f"{LISTENS}{os.getpid()}").touch()


def _fork(*_: Any) -> None:
    """Leaves a child with all descriptors, as a data loader of a user may."""
    if os.fork():
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    pathlib.Path(os.environ[SITE], f"{FORKED}{os.getpid()}").touch()
    time.sleep(LIFE_SECONDS)
    os._exit(0)
