"""Keeps a process going whose terminal is gone: what it still says goes nowhere.

Invariant: writing to a terminal that hung up fails with EIO, and SIGHUP comes about then; a run has to save and leave,
not die of what it wanted to print. The consoles write through this, and the command says its last words so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator


@contextlib.contextmanager
def outliving_terminal() -> Iterator[None]:
    """Drops what could not be written in it because the terminal is gone, and all that is written to it later."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(null, descriptor)
        os.close(null)
