"""Passes on what the workers write, line by line, each line with its worker's name in front.

Invariant: a line of a worker appears whole, once, in its order, on the stream (stdout or stderr) it was written to;
nothing of another worker stands inside it. A reader that went away (`| head`) does not hold up the workers.

Used by what starts the workers, and by `commands/launch.py` for the launcher's own words.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from typing import IO

from tfdist.telemetry.console.console import paint, terminal_width, wrap_lines
from tfdist.telemetry.facts import Level

STDOUT, STDERR = 1, 2
_LONGEST_LINE_BYTES = 1 << 20
DRAIN_SECONDS = 5.0


class Output:
    """The launcher's stdout and stderr."""

    def __init__(self, stdout: int = STDOUT, stderr: int = STDERR) -> None:
        self._file_descriptors = {STDOUT: stdout, STDERR: stderr}
        self._lock = threading.Lock()
        self._pumps: list[threading.Thread] = []

    def report(self, message: str, level: Level = "info") -> None:
        """Writes the launcher's own words to stderr."""
        width = terminal_width(sys.stderr)
        wrapped = wrap_lines(message, width and width - len("[launch] "))
        lines = [f"[launch] {paint(line, level, sys.stderr)}\n" for line in wrapped.splitlines()]
        with self._lock:
            self._write(STDERR, "".join(lines).encode())

    def follow(self, pipe: IO[bytes], stream: int, worker: int) -> None:
        """Passes on what a worker writes to `pipe` until its end, on a thread of its own."""
        self._pumps.append(read_pipe(pipe, self.open_feed(stream, worker)))

    def open_feed(self, stream: int, worker: int) -> Callable[[bytes], None]:
        """Returns a function that takes a worker's bytes and passes on each whole line; b"" is the end."""
        rest = b""

        def feed(chunk: bytes) -> None:
            nonlocal rest
            *lines, rest = re.split(rb"\r?\n|\r(?!$)", rest + chunk)
            if rest and (not chunk or len(rest) > _LONGEST_LINE_BYTES):
                lines, rest = [*lines, rest], b""
            with self._lock:
                for line in lines:
                    self._write(stream, b"[worker %d] " % worker + line.rstrip(b"\r") + b"\n")

        return feed

    def drain(self, timeout_seconds: float = DRAIN_SECONDS) -> None:
        """Waits until every pipe has ended and everything is written."""
        for pump in self._pumps:
            pump.join(timeout_seconds)
        self._pumps = [pump for pump in self._pumps if pump.is_alive()]

    def _write(self, stream: int, data: bytes) -> None:
        while data and (file_descriptor := self._file_descriptors.get(stream)) is not None:
            try:
                data = data[os.write(file_descriptor, data) :]
            except OSError:  # nobody reads any more
                del self._file_descriptors[stream]


def read_pipe(pipe: IO[bytes], take: Callable[[bytes], None]) -> threading.Thread:
    """The thread that hands over what is written to a pipe, and b"" at its end."""

    def read() -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                take(chunk)
        take(b"")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread
