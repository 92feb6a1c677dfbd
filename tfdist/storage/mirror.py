"""Brings the files of a local directory to gs://, for libraries that can only write local ones.

Invariant: what `close` returned from is stored whole. Objects cannot be appended to, so a file that grew is put again,
at most every `interval_seconds`. Telemetry keeps TensorBoard's event files so.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading

from tfdist.storage import files

_log = logging.getLogger(__name__)


class Mirror:
    """A local directory, `local`, whose files appear below `remote`.

    A put that fails is tried again with the next one, and said as a warning; only `close` raises it. A process that is
    killed loses what came since the last put.
    """

    def __init__(self, remote: str, *, interval_seconds: float = 30.0) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="tfdist-mirror-")
        self.local = self._scratch.name
        self._remote = remote
        self._interval_seconds = interval_seconds
        self._stored: dict[str, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._put_until_closed, name="tfdist-mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stores the rest and removes the local directory; raises OSError. Closing again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        with self._scratch:
            self._put_what_grew()

    def _put_until_closed(self) -> None:
        while not self._closing.wait(self._interval_seconds):
            try:
                self._put_what_grew()
            except OSError as error:
                _log.warning("Files could not be stored in %s and will be tried again: %s", self._remote, error)

    def _put_what_grew(self) -> None:
        for name in files.list_tree(self.local):
            content = files.read(os.path.join(self.local, name))
            if self._stored.get(name) != len(content):
                files.write_atomic(files.join(self._remote, name), content)
                self._stored[name] = len(content)
