"""Logs that grow by lines, and the files of a local directory on gs://, whose objects cannot be appended to.

Invariant: a line is written whole and in order, and what an earlier run wrote stays in front of it. What `close`
returned from is stored whole. On gs:// a file that grew is put again, at most every `interval_seconds`, and so a
process that is killed loses the lines of the last interval.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator

from tfdist.storage.gcs import GcsFiles
from tfdist.storage.local_files import LocalFiles

_log = logging.getLogger(__name__)
LOOK_SECONDS = 0.5  # between two looks whether something grew


class LogSink:
    """A local file that each line reaches in one `write` with O_APPEND, so that several processes may share it."""

    def __init__(self, path: str) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor: int | None = os.open(path, flags, 0o666)
        with self._locked(fcntl.LOCK_EX) as descriptor:  # what is half written has no writer: a power cut left it
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")

    def write_line(self, line: str) -> None:
        """Adds `line`, which holds no line break; raises ValueError when it does."""
        if "\n" in line:
            raise ValueError(f"a log line holds no line break. Received: {line!r}")
        data = f"{line}\n".encode()
        try:
            with self._locked(fcntl.LOCK_SH) as descriptor:
                while data:  # one turn, unless the disk is full: then the next write tells why
                    data = data[os.write(descriptor, data) :]
        except OSError as error:
            error.filename = self._path
            raise

    def close(self) -> None:
        """Leaves every line stored, or raises what the store raised. Closing again does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[int]:
        """Holds a lock of the file: shared while a line is written, since another process sees a part of its bytes."""
        if self._descriptor is None:
            raise ValueError("the log is closed")
        fcntl.flock(self._descriptor, kind)
        try:
            yield self._descriptor
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class Mirror:
    """A local directory, `local`, whose files appear below `remote`; `files.open_mirror` makes one.

    A put that fails is tried again with the next one, and said as a warning; only `close` raises it.
    """

    def __init__(self, remote: str, interval_seconds: float) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="tfdist-mirror-")
        self.local = self._scratch.name
        self._store = GcsFiles()
        self._remote = remote.rstrip("/")
        self._files = LocalFiles()
        self._interval_seconds = interval_seconds
        self._stored: dict[str, int] = {}
        self._last_put = -float("inf")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._put_until_closed, name="tfdist-mirror", daemon=True)
        self._thread.start()

    def fetch(self, name: str) -> str:
        """The local path of a file, which begins with what is stored of it."""
        path = os.path.join(self.local, name)
        try:
            content = self._store.read(f"{self._remote}/{name}")
        except FileNotFoundError:
            return path
        self._stored[name] = len(content)
        self._files.write_atomic(path, content)
        return path

    def close(self) -> None:
        """Stores the rest and removes the local directory; raises OSError. Closing again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        with self._scratch:
            self._put_what_grew()

    def _put_until_closed(self) -> None:
        while not self._closing.wait(min(LOOK_SECONDS, self._interval_seconds)):
            if time.monotonic() < self._last_put + self._interval_seconds:
                continue
            try:
                self._put_what_grew()
            except OSError as error:
                _log.warning("Files could not be stored in %s and will be tried again: %s", self._remote, error)

    def _put_what_grew(self) -> None:
        for name in self._files.list_tree(self.local):
            path = os.path.join(self.local, name)
            if self._stored.get(name) != os.path.getsize(path):
                self._last_put = time.monotonic()
                content = self._files.read(path)
                self._store.write_atomic(f"{self._remote}/{name}", content)
                self._stored[name] = len(content)


class MirroredLog(LogSink):
    """A log of lines behind what an object holds."""

    def __init__(self, path: str, flush_seconds: float) -> None:
        directory, _, name = path.rpartition("/")
        self._mirror = Mirror(directory, flush_seconds)
        super().__init__(self._mirror.fetch(name))

    def close(self) -> None:
        super().close()
        self._mirror.close()
