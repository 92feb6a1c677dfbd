"""The console on a terminal: a bar for the epoch that runs, and above it lines for those that are over.

Invariant: the terminal is drawn at most `_REDRAWS_PER_SECOND` times a second and by the calling thread, so the bar
takes some 0.2 % of a core and no thread of its own. `console.open_console` makes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

import rich.console
import rich.progress
from rich.progress import BarColumn, TextColumn
from rich.text import Text

from tfdist.telemetry.console.base import Console, EpochThrottle
from tfdist.telemetry.console.console_text import (
    EpochSummary,
    Plan,
    Progress,
    TimeLeft,
    bar_text,
    epoch_line,
    epoch_text,
    plan_text,
)
from tfdist.telemetry.console.hangup import outliving_terminal
from tfdist.telemetry.facts import Level

_REDRAWS_PER_SECOND = 5
_BAR_WIDTH = 10
_STYLES = {"info": "", "warning": "yellow", "error": "red"}


def can_move_cursor(stdout: TextIO) -> bool:
    """Whether the terminal can draw a bar; TERM=dumb cannot."""
    console = rich.console.Console(file=stdout)
    return console.is_terminal and not console.is_dumb_terminal


class ProgressBarConsole(Console):
    """`Console` with rich. Between `start` and `close` other prints of this process appear above the bar."""

    def __init__(self, stdout: TextIO, stderr: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = rich.console.Console(file=stdout, markup=False, highlight=False, emoji=False)
        self._stderr = stderr
        self._clock = clock
        self._plan = Plan()
        self._time_left = TimeLeft(None, clock)
        self._epochs = EpochThrottle(None, clock)
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._last_redraw_time = -float("inf")

    def start(self, plan: Plan) -> None:
        self.close()
        self._plan = plan
        self._time_left = TimeLeft(plan.total_steps, self._clock)
        self._epochs = EpochThrottle(plan.total_epochs, self._clock)
        self.message(plan_text(plan))
        self._bar = rich.progress.Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=_BAR_WIDTH),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._terminal,
            auto_refresh=False,
            transient=True,
            redirect_stderr=self._stderr.isatty(),
        )
        self._task = self._bar.add_task("training", total=plan.steps_per_epoch, figures="")
        with outliving_terminal():
            self._bar.start()

    def update(self, progress: Progress) -> None:
        seconds_left = self._time_left.seconds(progress.step)
        self._show(self._epochs.due())
        now = self._clock()
        if self._bar is None or now - self._last_redraw_time < 1 / _REDRAWS_PER_SECOND:
            return
        self._last_redraw_time = now
        epoch = epoch_text(self._plan, progress.epoch)
        width = self._terminal.width - len(epoch) - _BAR_WIDTH - len("  ")
        figures = bar_text(self._plan, progress, seconds_left, width=width)
        self._bar.update(self._task, completed=progress.step_in_epoch, description=epoch, figures=figures)
        with outliving_terminal():
            self._bar.refresh()

    def end_epoch(self, summary: EpochSummary) -> None:
        self._show(self._epochs.ended(summary))

    def message(self, text: str, level: Level = "info") -> None:
        line = text if level == "info" else f"{level}: {text}"
        with outliving_terminal():
            if level == "info" or self._stderr.isatty():
                self._terminal.print(Text(line, style=_STYLES[level]), soft_wrap=True)
            else:
                self._stderr.write(f"{line}\n")
                self._stderr.flush()

    def close(self) -> None:
        self._show(self._epochs.rest())
        bar, self._bar = self._bar, None
        if bar is not None:
            with outliving_terminal():
                bar.stop()

    def _show(self, summary: EpochSummary | None) -> None:
        if summary is not None:
            self.message(epoch_line(self._plan, summary, width=self._terminal.width))
