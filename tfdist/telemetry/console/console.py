"""Opens the console of a process.

Invariant: only the chief speaks, other workers but for errors; results and epochs go to standard output, warnings and
errors to standard error; what does not go to a terminal is plain lines. The loop calls `update` some ten times a
second, which costs microseconds. `experiment.py` opens one console a process.
"""

from __future__ import annotations

import sys
from typing import TextIO

from tfdist.telemetry.console.base import Console, PlainConsole, write_line
from tfdist.telemetry.facts import Level


def open_console(is_chief: bool, *, stdout: TextIO | None = None, stderr: TextIO | None = None) -> Console:
    """The console of this process: a progress bar on a terminal, lines elsewhere, silence on other workers."""
    stdout, stderr = stdout or sys.stdout, stderr or sys.stderr
    if not is_chief:
        return NullConsole(stderr)
    if stdout.isatty():
        from tfdist.telemetry.console.progress_bar import ProgressBarConsole, can_move_cursor

        if can_move_cursor(stdout):
            return ProgressBarConsole(stdout, stderr)
    return PlainConsole(stdout, stderr)


class NullConsole(Console):
    """`Console` of a worker that is not the chief: silent but for errors."""

    def __init__(self, stderr: TextIO | None = None) -> None:
        self._stderr = stderr or sys.stderr

    def message(self, text: str, level: Level = "info") -> None:
        if level == "error":
            write_line(self._stderr, text, level)
