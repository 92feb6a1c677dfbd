"""The steps by which a local file comes to be, one method each.

Invariant: whatever `local` changes on a disk, it changes through here, so that a test can stop it between any two
steps, or within a write, and look at what a crash there would leave.
"""

from __future__ import annotations

import ctypes
import os

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


class Syscalls:
    """The calls of the operating system; the methods raise OSError."""

    def create(self, path: str) -> int:
        """Opens a new file for writing; raises FileExistsError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def exchange(self, one: str, other: str) -> None:
        """Swaps two names in one step, see rename(2); where the file system cannot, one step after the other."""
        failed = True
        if rename := getattr(ctypes.CDLL(None), "renameat2", None):
            failed = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) != 0
        if failed:
            os.rename(other, f"{one}.old")
            os.rename(one, other)
            os.rename(f"{one}.old", one)

    def link(self, source: str, target: str) -> None:
        """Gives a file a second name; raises FileExistsError."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def fsync_directory(self, path: str) -> None:
        """Makes its names survive a power cut; see fsync(2), which leaves the directory to the caller."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
