"""The console on a terminal: a bar for the run, and above it lines for epochs that are over.

Invariant: the terminal is drawn five times a second at most and by the calling thread, so the bar takes some 0.2 % of a
core and no thread of its own. It fills what its text leaves of the terminal's width; rich cuts what a narrow terminal
has no room for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

import rich.console
import rich.progress
from rich.progress import BarColumn, TextColumn
from rich.text import Text

from tfdist.telemetry.console.console import (
    STYLES,
    Console,
    PlainConsole,
    outliving_terminal,
    terminal_width,
    wrap_lines,
    write_line,
)
from tfdist.telemetry.console.console_text import Progress, TrainingPlan, progress_line
from tfdist.telemetry.facts import Level

_MIN_BAR_WIDTH = 10  # columns


class ProgressBarConsole(PlainConsole):
    """`Console` with rich. Between `start` and `close` other prints of this process appear above the bar.

    The bar is of the run's steps; of those of an epoch where nobody knows how many the run has.
    """

    progress_seconds = 0.2

    def __init__(self, stdout: TextIO, stderr: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stdout, stderr, clock=clock)
        self._terminal = rich.console.Console(file=stdout, markup=False, highlight=False, emoji=False)
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._column = BarColumn(bar_width=_MIN_BAR_WIDTH)

    def start(self, plan: TrainingPlan) -> None:
        self.close()
        super().start(plan)
        self._progress_shown_at = -float("inf")
        self._bar = rich.progress.Progress(
            self._column,
            TextColumn("{task.description}", markup=False),
            console=self._terminal,
            auto_refresh=False,
            transient=True,
            redirect_stderr=self._stderr.isatty(),
        )
        self._task = self._bar.add_task("training", total=plan.total_steps or plan.steps_per_epoch)
        with outliving_terminal():
            self._bar.start()

    def message(self, text: str, level: Level = "info") -> None:
        if level != "info" and not self._stderr.isatty():
            write_line(self._stderr, text, level)
            return
        lines = wrap_lines(text if level == "info" else f"{level}: {text}", self._terminal.width)
        with outliving_terminal():
            self._terminal.print(Text(lines, style=STYLES[level]), soft_wrap=True)

    def close(self) -> None:
        super().close()
        bar, self._bar = self._bar, None
        if bar is not None:
            with outliving_terminal():
                bar.stop()

    def _show_progress(self, progress: Progress, seconds_left: float | None) -> None:
        if self._bar is None:
            return
        text = progress_line(self._plan, progress, seconds_left)
        done = progress.step if self._plan.total_steps else progress.step_in_epoch
        self._column.bar_width = max(self._terminal.width - len(text) - 1, _MIN_BAR_WIDTH)
        self._bar.update(self._task, completed=done, description=text)
        with outliving_terminal():
            self._bar.refresh()


def open_console(is_chief: bool, *, stdout: TextIO | None = None, stderr: TextIO | None = None) -> Console:
    """The console of this process: a bar on a terminal, lines elsewhere, silence on other workers."""
    stdout, stderr = stdout or sys.stdout, stderr or sys.stderr
    if not is_chief:
        return Console(stderr)
    return (PlainConsole if terminal_width(stdout) is None else ProgressBarConsole)(stdout, stderr)
