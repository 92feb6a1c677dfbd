"""A log that cannot end a run: neither with a full disk nor with a store that does not answer.

Invariant: no method raises OSError. The first line that could not be written is said, and at the end how many there
were. The logs of events and of metrics write through one each.
"""

from __future__ import annotations

import contextlib
import time

from tfdist.storage import files
from tfdist.storage.logs import LogSink

RETRY_SECONDS = 10.0  # a bucket takes its time to refuse


class GuardedLog:
    """A log of `files.open_log`, opened with its first line. The methods return what the user has to be told."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sink: LogSink | None = None
        self._num_lost = 0
        self._retry_at = 0.0

    def write_line(self, line: str) -> str:
        """Adds a line, unless one before it failed a moment ago."""
        if time.monotonic() < self._retry_at:
            self._num_lost += 1
            return ""
        try:
            if self._sink is None:
                self._sink = files.open_log(self._path)
            self._sink.write_line(line)
            return ""
        except OSError as error:
            self._num_lost += 1
            self._retry_at = time.monotonic() + RETRY_SECONDS
            with contextlib.suppress(OSError):
                self._close_sink()  # opening it again ends a line that was written in part
            if self._num_lost > 1:
                return ""
            return f"{self._path} cannot be written: {_reason(error)}. The run continues; this is said once."

    def close(self) -> str:
        """Leaves every line stored; a later line opens the log again."""
        num_lost, self._num_lost, self._retry_at = self._num_lost, 0, 0.0
        problems = []
        if num_lost:
            problems.append(f"{num_lost:,} line{'s' * (num_lost > 1)} of {self._path} could not be written.")
        try:
            self._close_sink()
        except OSError as error:
            problems.append(f"The last lines of {self._path} could not be stored: {_reason(error)}.")
        return " ".join(problems)

    def _close_sink(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()


def _reason(error: OSError) -> str:
    return " ".join((error.strerror or str(error)).split())
