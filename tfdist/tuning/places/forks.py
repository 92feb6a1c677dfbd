"""What a forked process does first, whatever it becomes.

Invariant: it never runs on into what its parent was about to do, and does not outlive its parent. Linux and
other systems with `fork` only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Iterator

from tfdist.errors import EXIT_BUG

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Ends the process with the error that leaves it, if one does."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(EXIT_BUG)


def die_with(parent: int) -> None:
    """Has this process killed when `parent`, which forked it, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(EXIT_BUG)
