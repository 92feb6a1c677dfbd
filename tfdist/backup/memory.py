"""A second place for backups: the memory of the chief's machine, which takes them more often than a store could.

A directory of a file system in memory, such as /dev/shm, outlives the process and not the machine. The run directory
names it, in one small file, so that a process on another machine, or another run, does not take it for its own.

Invariant: what is found here was made by the last start of this run. It goes when a run ends or leaves as it should,
having stored all; else it stays, for the next start. `training/survival.py` opens it, on the chief.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile

from tfdist.backup.teller import Teller
from tfdist.storage import files

_PREFIX = "tfdist-"


class MemoryPlace:
    """The place of one run.

    Args:
      pointer: `RunDirectory.memory`.
      parent: where a directory is made if there is none yet.
    """

    def __init__(self, pointer: str, parent: str) -> None:
        self._pointer = pointer
        self._parent = parent

    def find(self) -> str | None:
        """The directory that the last start left on this machine, if it did; raises OSError if that cannot be known."""
        try:
            directory = json.loads(files.read(self._pointer))["directory"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return directory if os.path.isdir(directory) and os.path.basename(directory).startswith(_PREFIX) else None

    def open(self) -> str:
        """The directory for this start's backups, the one that `find` finds if there is one; raises OSError."""
        if (found := self.find()) is not None:
            return found
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent)  # a name that no other machine has
        files.write_atomic(self._pointer, json.dumps({"directory": directory}))
        return directory


def forget(pointer: str, directory: str | None = None) -> None:
    """Takes the run directory's word back, and frees the memory. A word that stays, names nothing."""
    if directory is not None:
        files.remove_tree(directory)
    with contextlib.suppress(OSError):
        files.remove(pointer)


class OnlyWarnings:
    """Passes on of what backups tell what the user should know; each of the frequent commits is no event."""

    def __init__(self, tell: Teller) -> None:
        self._tell = tell

    def info(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None: ...

    def warning(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        self._tell.warning(event, step=step, message=message, **details)
