"""The table of a sweep on a terminal: the trials that run, the best so far, and above them a line for each that ended.

Invariant: drawn by the calling thread, at most `_REDRAWS_PER_SECOND` times a second unless a trial starts or ends, and
never higher or wider than the terminal.
"""

from __future__ import annotations

import sys
from typing import TextIO

import rich.console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tfdist.errors import printable
from tfdist.report.words import duration_text, values_text
from tfdist.telemetry.console.progress_bar import can_move_cursor
from tfdist.tuning.report.table import (
    PlainTable,
    SweepTable,
    end_line,
    epoch_text,
    objective_text,
    summary,
    sweep_line,
    trial_line,
)
from tfdist.tuning.schedule.history import RUNNING, Event, Sweep, Trial

_REDRAWS_PER_SECOND = 5
_NUM_BEST = 5
_FRAME_LINES = 6  # the summary, the table's head and rules, and room for the prompt
_STYLES = {"infeasible": "yellow", "failed": "red", "interrupted": "yellow"}


def open_table(stdout: TextIO | None = None, *, max_seconds: float | None = None) -> SweepTable:
    """The table on a terminal that can move its cursor, else lines; `max_seconds` as of `SweepTable`."""
    stdout = stdout or sys.stdout
    is_live = stdout.isatty() and can_move_cursor(stdout)
    return (LiveTable if is_live else PlainTable)(stdout, max_seconds=max_seconds)


class LiveTable(SweepTable):
    """`SweepTable` with rich. Until `close` other prints of this process appear above the table."""

    def __init__(self, stdout: TextIO, *, max_seconds: float | None = None) -> None:
        super().__init__(stdout, max_seconds=max_seconds)
        self._terminal = rich.console.Console(file=stdout, markup=False, highlight=False, emoji=False)
        self._live: Live | None = None
        self._last_redraw_time = -float("inf")
        self._is_closed = False

    def refresh(self) -> None:
        if self._live is not None:
            self._draw(now=False)

    def close(self) -> None:
        self._is_closed = True
        if self._live is not None:
            self._draw(now=True)
            self._live.stop()
            self._live = None
            if self.sweep.is_ended:
                self._print(end_line(self.sweep))

    def _show(self, event: Event, sweep: Sweep, trial: Trial | None) -> None:
        if self._is_closed:
            return
        if self._live is None:
            self._live = Live(console=self._terminal, auto_refresh=False, redirect_stderr=self._terminal.is_terminal)
            self._live.start()
        if event.get("event") == "sweep_started":
            self._print(sweep_line(sweep))
        elif event.get("event") == "trial_ended" and trial is not None:
            self._print(trial_line(sweep, trial), style=_STYLES.get(trial.status, ""))
        self._draw(now=event.get("event") != "trial_reported")

    def _print(self, line: str, style: str = "") -> None:
        self._terminal.print(Text(line, style=style), soft_wrap=True)

    def _draw(self, *, now: bool) -> None:
        too_soon = self._clock() - self._last_redraw_time < 1 / _REDRAWS_PER_SECOND
        if self._live is None or (too_soon and not now):
            return
        self._last_redraw_time = self._clock()
        rows = max(self._terminal.height - _FRAME_LINES, 3)
        table = build_table(self.sweep, rows=rows, seconds=self._seconds(), seconds_left=self._seconds_left())
        self._live.update(table, refresh=True)


def build_table(sweep: Sweep, *, rows: int, seconds: float, seconds_left: float | None) -> Table:
    """At most `rows` trials: the best ones, then those that run, and how far the sweep is as the title."""
    running = [trial for trial in sweep.trials if trial.status == RUNNING]
    num_best = max(min(_NUM_BEST, rows - len(running)), 1)
    best = [trial for trial in sweep.ranked if trial.status != RUNNING][:num_best]
    shown = [*best, *running][:rows]
    title = " | ".join([*summary(sweep, seconds_left=seconds_left), f"{len(running)} running", duration_text(seconds)])
    table = Table(title=Text(title), title_justify="left", title_style="", expand=True, padding=(0, 1), box=None)
    table.add_column("trial", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column(sweep.objective, justify="right", no_wrap=True)
    table.add_column("values", no_wrap=True, overflow="ellipsis", ratio=1)
    for trial in shown:
        style = "bold" if trial == sweep.best else _STYLES.get(trial.status, "")
        table.add_row(*_cells(sweep, trial), style=style)
    return table


def _cells(sweep: Sweep, trial: Trial) -> list[Text]:
    latest = trial.curve[-1].objective if trial.status == RUNNING and trial.curve else trial.objective
    state = "best" if trial == sweep.best and trial.status != RUNNING else trial.status
    objective = "" if latest is None else objective_text(latest)
    texts = [trial.name, state, epoch_text(trial), objective, values_text(trial.values)]
    return [Text(printable(text)) for text in texts]
