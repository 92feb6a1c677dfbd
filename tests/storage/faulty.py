"""A local store that fails or crashes at any step of what it does, so that tests can try every one.

A boundary is one call of `Syscalls`; a write is two, as a crash can leave a part of its bytes. `crash_everywhere` runs
a function again and again, with the crash at boundary 0, 1, 2 … until it ends before the crash comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator

from tfdist.storage import files
from tfdist.storage.local import LocalFiles, Syscalls


class Crashed(BaseException):
    """Stands for the end of the process: code that tidies up after errors cannot, since every later step raises it."""


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Where the store was stopped: before the call `name` of `path`, or within it."""

    index: int
    name: str
    path: str
    within: bool = False


class FaultySyscalls(Syscalls):
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

    def create(self, path: str) -> int:
        self._pass("create", path)
        descriptor = super().create(path)
        self._paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        path = self._paths[descriptor]
        self._pass("write", path)
        if self._is_here("write", path):
            super().write(descriptor, data[: len(data) // 2])
            self._stop()
        return super().write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._pass("fsync", self._paths[descriptor])
        super().fsync(descriptor)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)  # also after a crash, when the system closes what was open

    def replace(self, source: str, target: str) -> None:
        self._pass("replace", target)
        super().replace(source, target)

    def exchange(self, one: str, other: str) -> None:
        self._pass("exchange", other)
        super().exchange(one, other)

    def link(self, source: str, target: str) -> None:
        self._pass("link", target)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._pass("unlink", path)
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self._pass("mkdir", path)
        super().mkdir(path)

    def rmdir(self, path: str) -> None:
        self._pass("rmdir", path)
        super().rmdir(path)

    def fsync_directory(self, path: str) -> None:
        self._pass("fsync_directory", path)
        super().fsync_directory(path)

    def _pass(self, name: str, path: str) -> None:
        if self._is_here(name, path, within=False):
            self._stop()

    def _is_here(self, name: str, path: str, within: bool = True) -> bool:
        if self.stopped and self._error is None:
            raise Crashed
        self.reached.append(Boundary(len(self.reached), name, os.path.basename(path), within))
        return self.reached[-1].index == self._stop_at

    def _stop(self) -> None:
        self.stopped = True
        raise Crashed if self._error is None else self._error


@contextlib.contextmanager
def installed(calls: Syscalls) -> Iterator[None]:
    """Lets every local path go through `calls` meanwhile."""
    real, files._LOCAL = files._LOCAL, LocalFiles(calls)
    try:
        yield
    finally:
        files._LOCAL = real


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
        calls = FaultySyscalls(index)
        with installed(calls), contextlib.suppress(Crashed):
            function(index)
        check(index, calls.reached[index] if calls.stopped else None)
        if not calls.stopped:
            return index
        index += 1
