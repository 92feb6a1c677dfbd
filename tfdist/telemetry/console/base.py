"""The protocol that a reporter calls, the console in lines, and how one writes: a terminal that hung up ends no run.

Writing to such a terminal fails with EIO, and SIGHUP comes about then; the run has to save and leave.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from tfdist.telemetry.console.console_text import (
    EpochSummary,
    Plan,
    Progress,
    TimeLeft,
    epoch_line,
    plan_text,
    progress_line,
)
from tfdist.telemetry.facts import Event, Level, RunFacts

EPOCH_LINE_SECONDS, PROGRESS_LINE_SECONDS = 5.0, 10.0


class Console:
    """What a run tells. This one shows nothing."""

    def belongs_to(self, run: RunFacts) -> None:
        """The run is known from now on."""

    def start(self, plan: Plan) -> None:
        """The training begins, or continues."""

    def update(self, progress: Progress) -> None:
        """The training has come this far; most calls show nothing."""

    def end_epoch(self, summary: EpochSummary) -> None:
        """An epoch is over and evaluated; most of those that end within seconds are not shown."""

    def message(self, text: str, level: Level = "info") -> None:
        """A sentence; possible before `start` and after `close`, too."""

    def event(self, event: Event) -> None:
        """Something happened; shown where it has a message."""
        if event.message is not None:
            self.message(event.message, event.level)

    def close(self) -> None:
        """The training is over: shows its last epoch and gives the terminal back. Closing again does nothing."""


def write_line(stream: TextIO, text: str, level: Level = "info") -> None:
    """Writes a line, which begins with its level unless that is "info"; a terminal breaks it between words."""
    text = text if level == "info" else f"{level}: {text}"
    if stream.isatty() and (width := columns_of(stream)):
        text = wrap_words(text, width)
    with outliving_terminal():
        stream.write(f"{text}\n")
        stream.flush()


def wrap_words(text: str, width: int) -> str:
    """The text in lines of so many columns; a longer word, such as a path, stays whole for who copies it."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) if len(line) > width else line for line in text.split("\n"))


def columns_of(stream: TextIO) -> int | None:
    """Columns of a terminal, or those that COLUMNS names, as `tfdist.launch` does for its workers; else None."""
    if not stream.isatty() and stream is not sys.stdout:
        return None
    unknown = 80 if stream.isatty() else 0  # a terminal that does not say its size is drawn on as one of 80
    return shutil.get_terminal_size((unknown, 0)).columns or None


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
