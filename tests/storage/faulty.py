"""A local store that fails or crashes at any step of what it does, so that tests can try every one.

A boundary is one call of the system that changes a disk; a write is two, as a crash can leave a part of its bytes.
`crash_everywhere` runs a function again and again, with the crash at boundary 0, 1, 2 … until it ends before the crash
comes.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.storage import local_files

CHANGING = ("replace", "unlink", "mkdir", "rmdir", "exchange")


class Crashed(BaseException):
    """Stands for the end of the process: code that tidies up after errors cannot, since every later step raises it."""


class Calls:
    """What `local` calls in place of `os`: a test overrides what is to go wrong."""

    def __getattr__(self, name: str) -> Any:
        return _exchange if name == "exchange" else getattr(os, name)


_exchange = local_files.exchange


class FaultyCalls(Calls):
    """The real calls, up to boundary `stop_at`.

    Args:
      stop_at: the boundary at which the fault comes; None for never, to count them.
      error: raised once at that boundary, after which all continues; None for a crash, after which nothing does.

    Attributes:
      reached: the names of the boundaries that were passed, and of the one that was not.
      stopped: whether the fault came.
    """

    def __init__(self, stop_at: int | None = None, *, error: OSError | None = None) -> None:
        self._stop_at = stop_at
        self._error = error
        self.reached: list[str] = []
        self.stopped = False

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)

        def change(*arguments: Any) -> Any:
            self._pass(name)
            return call(*arguments)

        return change if name in CHANGING else call

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._pass("create")
        return os.open(path, flags, mode)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._pass("write")
        if self._is_here("write"):  # within it
            os.write(descriptor, data[: len(data) // 2])
            self._stop()
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._pass("fsync_directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync")
        os.fsync(descriptor)

    def _pass(self, name: str) -> None:
        if self._is_here(name):
            self._stop()

    def _is_here(self, name: str) -> bool:
        if self.stopped and self._error is None:
            raise Crashed
        self.reached.append(name)
        return len(self.reached) - 1 == self._stop_at

    def _stop(self) -> None:
        self.stopped = True
        raise Crashed if self._error is None else self._error


@contextlib.contextmanager
def installed(calls: Calls) -> Iterator[None]:
    """Lets every local path go through `calls` meanwhile."""
    before = local_files.os, local_files.exchange
    local_files.os, local_files.exchange = calls, calls.exchange
    try:
        yield
    finally:
        local_files.os, local_files.exchange = before


def crash_everywhere(function: Callable[[int], None], check: Callable[[int, str | None], None]) -> int:
    """Crashes `function` at each of its boundaries in turn, and looks at what that left.

    Args:
      function: takes the number of the round, for a directory of its own; does the same in each.
      check: takes the number of the round and the boundary of the crash, None in the last round, which had none.

    Returns:
      The number of boundaries.
    """
    index = 0
    while True:
        calls = FaultyCalls(index)
        with installed(calls), contextlib.suppress(Crashed):
            function(index)
        check(index, calls.reached[index] if calls.stopped else None)
        if not calls.stopped:
            return index
        index += 1
