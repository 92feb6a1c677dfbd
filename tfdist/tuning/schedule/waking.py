"""Wakes a process that waits for several things at once, from whatever thread has news for it.

Used by the chief of a sweep, for its oracle's thread and its workers' messages, and by the workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable


def open_waking(leaving: contextlib.ExitStack) -> tuple[int, Callable[[], None]]:
    """A descriptor that becomes readable, and the function, for any thread, that makes it so; `leaving` closes it."""
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        leaving.callback(os.close, descriptor)
    os.set_blocking(wake, False)

    def wake_up() -> None:
        with contextlib.suppress(OSError):  # full of calls that nobody has heard yet, or nobody waits any more
            os.write(wake, b".")

    return woken, wake_up
