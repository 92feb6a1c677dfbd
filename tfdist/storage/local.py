"""Files of this machine, or of a file system that is mounted on it.

Invariant: under its own name a file is whole, whatever happens while it is written: the bytes go to a temporary file
beside it, reach the disk, and then take its place in one step. `files` calls this for every path without a scheme.
"""

from __future__ import annotations

import contextlib
import os
import uuid

from tfdist.storage.log_sink import AppendedLog

_TEMPORARY_SUFFIX = ".tfdist-tmp"


class LocalFiles:
    """`Files` on a local path. The methods raise OSError."""

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def write_atomic(self, path: str, data: bytes) -> None:
        directory, name = os.path.split(path)
        temporary = os.path.join(directory, f".{name}.{uuid.uuid4().hex[:12]}{_TEMPORARY_SUFFIX}")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        _sync_directory(directory or ".")

    def open_log(self, path: str, flush_seconds: float) -> AppendedLog:
        del flush_seconds  # each line is written at once
        return AppendedLog(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list_names(self, path: str) -> list[str]:
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.endswith(_TEMPORARY_SUFFIX))

    def make_dirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _sync_directory(directory: str) -> None:
    """Makes a new name survive a power cut; see fsync(2), which leaves the directory to the caller."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
