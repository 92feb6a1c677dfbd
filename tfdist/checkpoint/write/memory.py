"""A second place for checkpoints: the memory of the chief's machine, which takes them more often than a store could.

A directory of a file system in memory, such as /dev/shm, outlives the process and not the machine. The run directory
names it, in one small file, so that a process on another machine, or another run, does not take it for its own; the
directory names the run in its turn.

Invariant: what is found here was made by the last start of this run, by this user: whatever the run directory's file
says, nothing else is read or removed. It goes when a run ends or leaves as it should, having stored all; else it stays,
for the next start. `training/recovery/survival.py` opens it, on the chief.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile

from tfdist.checkpoint.event_sink import EventSink
from tfdist.storage import files, private_directory
from tfdist.telemetry.json_text import from_json

_PREFIX = "tfdist-"
_NAME = re.compile(_PREFIX + r"[A-Za-z0-9_]{6,32}")  # as mkdtemp makes it
_OWNER = "run"  # the file that says whose directory it is


class MemoryPlace:
    """The place of one run.

    Args:
      pointer: `RunDirectory.memory`.
      parent: where a directory is made if there is none yet, and where all of this user's lie.
    """

    def __init__(self, pointer: str, parent: str) -> None:
        self._pointer = pointer if files.is_remote(pointer) else os.path.realpath(pointer)
        self._parent = os.path.abspath(parent)

    def find(self) -> str | None:
        """The directory that the last start left on this machine, if it did; raises OSError if that cannot be known."""
        directory = self._named()
        return directory if directory is not None and self._is_ours(directory) else None

    def left_alone(self) -> str | None:
        """What the run directory names and is there, and is not this run's."""
        directory = self._named()
        return directory if directory is not None and os.path.lexists(directory) and self.find() is None else None

    def open(self) -> str:
        """The directory for this start's checkpoints, the one that `find` finds if there is one; raises OSError."""
        if (found := self.find()) is not None:
            return found
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent)  # a name that no other machine has
        files.write_atomic(os.path.join(directory, _OWNER), self._pointer)
        files.write_atomic(self._pointer, json.dumps({"directory": directory}))
        return directory

    def _named(self) -> str | None:
        """The directory that the run directory names, if it can be one of ours."""
        try:
            path = from_json(files.read(self._pointer))["directory"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        parent, name = os.path.split(path) if isinstance(path, str) else ("", "")
        return path if parent == self._parent and _NAME.fullmatch(name) else None

    def _is_ours(self, directory: str) -> bool:
        try:
            if private_directory.problem(directory) is not None:
                return False
            return files.read(os.path.join(directory, _OWNER)) == self._pointer.encode()
        except OSError:
            return False


def forget(pointer: str, directory: str | None = None) -> None:
    """Takes the run directory's word back, and frees the memory. A word that stays, names nothing."""
    if directory is not None:
        files.remove_tree(directory)
    with contextlib.suppress(OSError):
        files.remove(pointer)


class OnlyWarnings:
    """Passes on of what checkpoints tell what the user should know; each of the frequent commits is no event."""

    def __init__(self, tell: EventSink) -> None:
        self._tell = tell

    def info(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None: ...

    def warning(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        self._tell.warning(event, step=step, message=message, **details)
