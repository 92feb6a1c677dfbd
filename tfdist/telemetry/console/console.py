"""Tells the person at the terminal what a run does.

Invariant: only the chief speaks, other workers but for errors; results and epochs go to standard output, warnings and
errors to standard error; what does not go to a terminal is plain lines. The loop calls `update` some ten times a
second, which costs microseconds. `experiment.py` opens one console a process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tfdist.telemetry.console.base import Console, EpochThrottle
from tfdist.telemetry.console.console_text import (
    EpochSummary,
    Plan,
    Progress,
    TimeLeft,
    epoch_line,
    plan_text,
    progress_line,
)
from tfdist.telemetry.console.hangup import outliving_terminal
from tfdist.telemetry.console.terminal_width import columns_of
from tfdist.telemetry.facts import Level

PROGRESS_LINE_SECONDS = 10.0


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


class PlainConsole(Console):
    """`Console` in lines: one at the start, one an epoch, and one in ten seconds within a longer epoch.

    Of epochs that take less than five seconds some are left out. On a terminal a line is no wider than that.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self._clock = clock
        self._plan = Plan()
        self._time_left = TimeLeft(None, clock)
        self._epochs = EpochThrottle(None, clock)
        self._last_line_time = clock()

    def start(self, plan: Plan) -> None:
        self._plan = plan
        self._time_left = TimeLeft(plan.total_steps, self._clock)
        self._epochs = EpochThrottle(plan.total_epochs, self._clock)
        self._last_line_time = self._clock()
        self.message(plan_text(plan))

    def update(self, progress: Progress) -> None:
        seconds_left = self._time_left.seconds(progress.step)
        self._show(self._epochs.due())
        now = self._clock()
        if now - self._last_line_time >= PROGRESS_LINE_SECONDS:
            self._last_line_time = now
            self.message(progress_line(self._plan, progress, seconds_left, width=columns_of(self._stdout)))

    def end_epoch(self, summary: EpochSummary) -> None:
        self._show(self._epochs.ended(summary))

    def message(self, text: str, level: Level = "info") -> None:
        _write_line(self._stdout if level == "info" else self._stderr, text, level)

    def close(self) -> None:
        self._show(self._epochs.rest())

    def _show(self, summary: EpochSummary | None) -> None:
        if summary is not None:
            self._last_line_time = self._clock()
            self.message(epoch_line(self._plan, summary, width=columns_of(self._stdout)))


class NullConsole(Console):
    """`Console` of a worker that is not the chief: silent but for errors."""

    def __init__(self, stderr: TextIO | None = None) -> None:
        self._stderr = stderr or sys.stderr

    def message(self, text: str, level: Level = "info") -> None:
        if level == "error":
            _write_line(self._stderr, text, level)


def _write_line(stream: TextIO, text: str, level: Level) -> None:
    prefix = "" if level == "info" else f"{level}: "
    with outliving_terminal():
        stream.write(f"{prefix}{text}\n")
        stream.flush()
