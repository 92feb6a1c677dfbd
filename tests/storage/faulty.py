"""A local store that fails or crashes at any step of what it does, so that tests can try every one.

A boundary is one call of the system that changes a disk; a write is two, as a crash can leave a part of its bytes.
`crash_everywhere` runs a function again and again, with the crash at boundary 0, 1, 2 … until it ends before the crash
comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.storage import local_files

CHANGING = ("replace", "unlink", "mkdir", "rmdir", "exchange")  # their last argument is what is changed


class Crashed(BaseException):
    """Stands for the end of the process: code that tidies up after errors cannot, since every later step raises it."""


class Calls:
    """What `local` calls in place of `os`: a test overrides what is to go wrong."""

    def __getattr__(self, name: str) -> Any:
        return _exchange if name == "exchange" else getattr(os, name)


_exchange = local_files.exchange


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Where the store was stopped: before the call `name` of `path`, or within it."""

    index: int
    name: str
    path: str
    within: bool = False


class FaultyCalls(Calls):
    """The real calls, up to boundary `stop_at`.

    Args:
      stop_at: the boundary at which the fault comes; None for never, to count them.
      error: raised once at that boundary, after which all continues; None for a crash, after which nothing does.

    Attributes:
      reached: the boundaries that were passed, and the one that was not.
      stopped: whether the fault came.
    """

    def __init__(self, stop_at: int | None = None, *, error: OSError | None = None) -> None:
        self._stop_at = stop_at
        self._error = error
        self._paths: dict[int, str] = {}
        self.reached: list[Boundary] = []
        self.stopped = False

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)

        def change(*arguments: Any) -> Any:
            self._pass(name, arguments[-1])
            return call(*arguments)

        return change if name in CHANGING else call

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._pass("create", path)
        descriptor = os.open(path, flags, mode)
        self._paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        path = self._paths[descriptor]
        self._pass("write", path)
        if self._is_here("write", path, within=True):
            os.write(descriptor, data[: len(data) // 2])
            self._stop()
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        path = self._paths[descriptor]
        self._pass("fsync_directory" if os.path.isdir(path) else "fsync", path)
        os.fsync(descriptor)

    def _pass(self, name: str, path: str) -> None:
        if self._is_here(name, path):
            self._stop()

    def _is_here(self, name: str, path: str, within: bool = False) -> bool:
        if self.stopped and self._error is None:
            raise Crashed
        self.reached.append(Boundary(len(self.reached), name, os.path.basename(path), within))
        return self.reached[-1].index == self._stop_at

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


def crash_everywhere(function: Callable[[int], None], check: Callable[[int, Boundary | None], None]) -> int:
    """Crashes `function` at each of its boundaries in turn, and looks at what that left.

    Args:
      function: takes the number of the round, for a directory of its own; does the same in each.
      check: takes the number of the round and where the crash came, None in the last round, which had none.

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
