"""What the person at the terminal sees of a sweep: a live table on a terminal, plain lines elsewhere.

Invariant: it only tells. Every event of the sweep's journal may be fed to `on_event`, those of an earlier start of a
resumed sweep too (`is_replay=True`, which shows nothing by itself); at most some five drawings a second, all by the
calling thread. The sweep opens one in the process that leads it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from tfdist.telemetry.console.console import PROGRESS_LINE_SECONDS
from tfdist.tuning.report.table_text import (
    Watch,
    end_line,
    epoch_text,
    objective_text,
    start_line,
    summary,
    sweep_line,
    trial_line,
)
from tfdist.tuning.schedule.history import Event, finite


class SweepTable(Protocol):
    """What a sweep tells."""

    def on_event(self, event: Event, *, is_replay: bool = False) -> None:
        """Takes in one event as it stands in `sweep.jsonl`."""

    def refresh(self) -> None:
        """Shows the time that has passed; to be called now and then while nothing happens."""

    def close(self) -> None:
        """Gives the terminal back and leaves the last table on it. Closing again does nothing."""


def open_table(stdout: TextIO | None = None, *, max_seconds: float | None = None) -> SweepTable:
    """The table on a terminal that can move its cursor, else lines; `max_seconds` as of `Watch`."""
    stdout = stdout or sys.stdout
    if stdout.isatty():
        from tfdist.telemetry.console.progress_bar import can_move_cursor

        if can_move_cursor(stdout):
            from tfdist.tuning.report.live_table import LiveTable

            return LiveTable(stdout, max_seconds=max_seconds)
    return PlainTable(stdout, max_seconds=max_seconds)


class PlainTable:
    """`SweepTable` in lines: one when a trial starts and one when it ends, and of the epochs one in ten seconds."""

    def __init__(
        self, stdout: TextIO, *, max_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stdout = stdout
        self._clock = clock
        self._watch = Watch(clock, max_seconds)
        self._last_line_time = clock()

    def on_event(self, event: Event, *, is_replay: bool = False) -> None:
        self._watch.add(event)
        if is_replay:
            return
        kind, trial = event.get("event"), self._watch.history.trial(str(event.get("trial")))
        sweep = self._watch.history.sweep
        if kind == "sweep_started":
            self._write(sweep_line(sweep))
        elif kind == "sweep_ended":
            self._write(end_line(sweep))
        elif trial is None:
            return
        elif kind == "trial_started":
            self._write(start_line(trial))
        elif kind == "trial_ended":
            figures = summary(sweep, seconds_left=self._watch.seconds_left())
            self._write(" | ".join([trial_line(sweep, trial), *figures]))
        elif kind == "trial_reported" and self._clock() - self._last_line_time >= PROGRESS_LINE_SECONDS:
            objective = objective_text(finite(event.get("objective")))
            self._write(f"trial {trial.name} epoch {epoch_text(trial)}  {sweep.objective} {objective}")

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _write(self, line: str) -> None:
        self._last_line_time = self._clock()
        self._stdout.write(f"{line}\n")
        self._stdout.flush()
