"""Logs that grow by lines, on a file system that can append and on an object store that cannot.

Invariant: a line is written whole and in order, and what an earlier run wrote stays in front of it. `files.open_log`
makes these; telemetry writes its JSON lines through them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

_log = logging.getLogger(__name__)


class LogSink(Protocol):
    """Where the lines of one log go."""

    def write_line(self, line: str) -> None:
        """Adds `line`, which holds no line break; raises ValueError when it does."""

    def close(self) -> None:
        """Leaves every line stored, or raises what the store raised. Closing again does nothing."""


class AppendedLog:
    """A local file that each line reaches in one `write` with O_APPEND, so that several processes may share it."""

    def __init__(self, path: str) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor: int | None = os.open(path, flags, 0o666)
        self._end_torn_line()

    def write_line(self, line: str) -> None:
        if self._descriptor is None:
            raise ValueError("the log is closed")
        data = _encode(line)
        while data:  # one turn, unless the disk is full: then the next write tells why
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                error.filename = self._path
                raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _end_torn_line(self) -> None:
        """A machine that lost its power may have left half a line, which must not swallow the next one."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")


class RewrittenLog:
    """An object that is rewritten whole by a thread, at most once in `interval_seconds`, and when it is closed.

    Objects cannot be appended to, and a store takes about one update a second for each. A process that is killed
    loses the lines of the last interval. A rewrite that fails is tried again with the next one, and said as a
    warning; only `close` raises it.
    """

    def __init__(self, put: Callable[[bytes], None], *, existing: bytes, interval_seconds: float) -> None:
        self._put = put
        self._content = bytearray(existing)
        if existing and not existing.endswith(b"\n"):
            self._content += b"\n"
        self._interval_seconds = interval_seconds
        self._last_put = -float("inf")
        self._dirty = False
        self._closing = False
        self._error: Exception | None = None
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._rewrite_until_closed, name="tfdist-log", daemon=True)
        self._thread.start()

    def write_line(self, line: str) -> None:
        data = _encode(line)
        with self._condition:
            if self._closing:
                raise ValueError("the log is closed")
            self._content += data
            self._dirty = True
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _rewrite_until_closed(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._dirty or self._closing)
                if not self._dirty:
                    return
                due_seconds = self._last_put + self._interval_seconds - time.monotonic()
                self._condition.wait_for(lambda: self._closing, timeout=max(due_seconds, 0))
                content, self._dirty, last = bytes(self._content), False, self._closing
            self._put_once(content)
            if last and self._error is not None:
                return

    def _put_once(self, content: bytes) -> None:
        self._last_put = time.monotonic()
        try:
            self._put(content)
            self._error = None
        except Exception as error:
            self._error = error
            with self._condition:
                self._dirty = True
            _log.warning("A log could not be stored and will be tried again: %s", error)


def _encode(line: str) -> bytes:
    if "\n" in line:
        raise ValueError(f"a log line holds no line break. Received: {line!r}")
    return (line + "\n").encode()
