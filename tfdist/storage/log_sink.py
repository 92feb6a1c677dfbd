"""Logs that grow by lines, of which a file system can append each.

Invariant: a line is written whole and in order, and what an earlier run wrote stays in front of it. `files.open_log`
makes these, for gs:// those of `mirror.py`; telemetry writes its JSON lines through them.
"""

from __future__ import annotations

import os


class LogSink:
    """A local file that each line reaches in one `write` with O_APPEND, so that several processes may share it."""

    def __init__(self, path: str) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor: int | None = os.open(path, flags, 0o666)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":  # half a line, as a power cut leaves it
            os.write(self._descriptor, b"\n")

    def write_line(self, line: str) -> None:
        """Adds `line`, which holds no line break; raises ValueError when it does."""
        if self._descriptor is None:
            raise ValueError("the log is closed")
        if "\n" in line:
            raise ValueError(f"a log line holds no line break. Received: {line!r}")
        data = f"{line}\n".encode()
        while data:  # one turn, unless the disk is full: then the next write tells why
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                error.filename = self._path
                raise

    def close(self) -> None:
        """Leaves every line stored, or raises what the store raised. Closing again does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
