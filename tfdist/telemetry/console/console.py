"""Consoles: what the training calls, the console in lines, and how one writes.

Invariant: only the chief speaks, other workers but for errors; results and epochs go to standard output, warnings and
errors to standard error; what does not go to a terminal is plain, a line for each message. The loop calls `update` some
ten times a second, which costs microseconds. Writing to a terminal that hung up ends no run: it fails with EIO, SIGHUP
comes about then, and the run has to save and leave.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from tfdist.telemetry.console.console_text import (
    EpochSummary,
    Progress,
    TrainingPlan,
    epoch_line,
    plan_text,
    progress_line,
)
from tfdist.telemetry.facts import Event, Level, RunFacts

EPOCH_LINE_SECONDS, PROGRESS_LINE_SECONDS = 5.0, 10.0
STYLES = {"info": "", "warning": "yellow", "error": "red"}


class Console:
    """The output of a run. This one, of a worker that is not the chief, is silent but for errors."""

    def __init__(self, stderr: TextIO | None = None) -> None:
        self._stderr = stderr or sys.stderr

    def set_run(self, run: RunFacts) -> None:
        """Sets the run whose output is shown; called once, before `start`."""

    def start(self, plan: TrainingPlan) -> None:
        """Shows that the training begins, or resumes."""

    def update(self, progress: Progress) -> None:
        """Takes the newest progress; shows it at intervals."""

    def end_epoch(self, summary: EpochSummary) -> None:
        """Shows the results of an epoch; most epochs of a few seconds are not shown."""

    def message(self, text: str, level: Level = "info") -> None:
        """A sentence; possible before `start` and after `close`, too."""
        if level == "error":
            write_line(self._stderr, text, level)

    def event(self, event: Event) -> None:
        """Shows an event that has a message."""
        if event.message is not None:
            self.message(event.message, event.level)

    def close(self) -> None:
        """The training is over: shows its last epoch and gives the terminal back. Closing again does nothing."""


def write_line(stream: TextIO, text: str, level: Level = "info") -> None:
    """Writes a message, which begins with its level unless that is "info": one line, or on a terminal wrapped."""
    with outliving_terminal():
        lines = wrap_lines(text if level == "info" else f"{level}: {text}", terminal_width(stream))
        stream.write(f"{paint(lines, level, stream)}\n")
        stream.flush()


def terminal_width(stream: TextIO) -> int | None:
    """The columns of a terminal; None where `stream` is none, or one that cannot draw (TERM=dumb)."""
    if not stream.isatty():
        return None
    from rich.console import Console as RichConsole

    console = RichConsole(file=stream)
    return None if console.is_dumb_terminal else console.width


def wrap_lines(text: str, width: int | None) -> str:
    """The text wrapped at words to a width; a word that is longer, such as a path, stays whole."""
    if width is None:
        return text
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
    return "\n".join("\n".join(wrapper.wrap(line)) for line in text.split("\n"))


def paint(text: str, level: Level, stream: TextIO) -> str:
    """The text in the level's color, where `stream` is a terminal that shows colors: not with NO_COLOR or TERM=dumb."""
    if not STYLES[level] or not stream.isatty():
        return text
    from rich.console import Console as RichConsole

    with (console := RichConsole(file=stream)).capture() as painted:
        console.out(text, style=STYLES[level], highlight=False, end="")
    return painted.get()


@contextlib.contextmanager
def outliving_terminal() -> Iterator[None]:
    """Drops what could not be written in it because the terminal is gone, and all that is written to it later."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(null, descriptor)
        os.close(null)


class PlainConsole(Console):
    """`Console` in lines: one at the start, one an epoch, and one in ten seconds within a longer epoch.

    An epoch that ends within five seconds of the last one shown is held back, until its time has come or a newer one
    ends. A subclass may show progress otherwise, and more often.
    """

    progress_seconds = PROGRESS_LINE_SECONDS

    def __init__(self, stdout: TextIO, stderr: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stderr)
        self._stdout = stdout
        self._clock = clock
        self._plan = TrainingPlan()
        self._first: tuple[int, float] | None = None  # the step and the moment of the first report
        self._held: EpochSummary | None = None
        self._shown_at = -float("inf")
        self._progress_shown_at = clock()

    def start(self, plan: TrainingPlan) -> None:
        self._plan = plan
        self._first = None
        self._held, self._shown_at, self._progress_shown_at = None, -float("inf"), self._clock()
        self.message(plan_text(plan))

    def update(self, progress: Progress) -> None:
        seconds_left = self._seconds_left(progress.step)
        self._show_epoch_if_due()
        if self._clock() - self._progress_shown_at >= self.progress_seconds:
            self._progress_shown_at = self._clock()
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

    def _seconds_left(self, step: int) -> float | None:
        """Estimates the seconds to the end of the run from the steps since the first report."""
        now = self._clock()
        first_step, first_time = self._first = self._first or (step, now)
        if self._plan.total_steps is None or step <= first_step:
            return None
        return (now - first_time) / (step - first_step) * max(self._plan.total_steps - step, 0)

    def _show_progress(self, progress: Progress, seconds_left: float | None) -> None:
        self.message(progress_line(self._plan, progress, seconds_left))

    def _show_epoch_if_due(self) -> None:
        if self._clock() - self._shown_at >= EPOCH_LINE_SECONDS:
            self._show_epoch()

    def _show_epoch(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._shown_at = self._progress_shown_at = self._clock()
            self.message(epoch_line(self._plan, held))
