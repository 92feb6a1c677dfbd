"""Opens the console of a process.

Invariant: only the chief speaks, other workers but for errors; results and epochs go to standard output, warnings and
errors to standard error; what does not go to a terminal is plain lines. The loop calls `update` some ten times a
second, which costs microseconds. `experiment.py` opens one console a process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tfdist.telemetry.console.base import (
    EPOCH_LINE_SECONDS,
    PROGRESS_LINE_SECONDS,
    Console,
    columns_of,
    write_line,
)
from tfdist.telemetry.console.console_text import (
    EpochSummary,
    Plan,
    Progress,
    TimeLeft,
    epoch_line,
    plan_text,
    progress_line,
)
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


class PlainConsole(Console):
    """`Console` in lines: one at the start, one an epoch, and one in ten seconds within a longer epoch.

    An epoch that ends within five seconds of the last one shown is held back, until its time has come or a newer one
    ends. On a terminal a line is no wider than that.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self._clock = clock
        self._plan = Plan()
        self._time_left = TimeLeft(None, clock)
        self._held: EpochSummary | None = None
        self._shown_at = -float("inf")
        self._last_line_time = clock()

    def start(self, plan: Plan) -> None:
        self._plan = plan
        self._time_left = TimeLeft(plan.total_steps, self._clock)
        self._held, self._shown_at, self._last_line_time = None, -float("inf"), self._clock()
        self.message(plan_text(plan))

    def update(self, progress: Progress) -> None:
        seconds_left = self._time_left.seconds(progress.step)
        self._show_epoch_if_due()
        self._show_progress(progress, seconds_left)

    def end_epoch(self, summary: EpochSummary) -> None:
        self._held = summary
        if summary.epoch == self._plan.total_epochs:
            self._show_epoch()
        else:
            self._show_epoch_if_due()

    def message(self, text: str, level: Level = "info") -> None:
        write_line(self._stdout if level == "info" else self._stderr, text, level)

    def close(self) -> None:
        self._show_epoch()

    def _show_progress(self, progress: Progress, seconds_left: float | None) -> None:
        if self._clock() - self._last_line_time >= PROGRESS_LINE_SECONDS:
            self._last_line_time = self._clock()
            self.message(progress_line(self._plan, progress, seconds_left, width=columns_of(self._stdout)))

    def _show_epoch_if_due(self) -> None:
        if self._clock() - self._shown_at >= EPOCH_LINE_SECONDS:
            self._show_epoch()

    def _show_epoch(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._shown_at = self._last_line_time = self._clock()
            self.message(epoch_line(self._plan, held, width=columns_of(self._stdout)))
