"""What the person at the terminal sees of a sweep: lines, and on a terminal a table of the best and the running trials.

Invariant: lines have no control characters; the table is drawn by the calling thread, at most `_REDRAWS_PER_SECOND`
times a second unless a trial starts or ends, and is never higher or wider than the terminal.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import rich.console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tfdist.errors import printable
from tfdist.report.words import count_text, duration_text, values_text
from tfdist.telemetry.console.console import PROGRESS_LINE_SECONDS
from tfdist.telemetry.console.console_text import number_text
from tfdist.telemetry.console.progress_bar import can_move_cursor
from tfdist.tuning.schedule import journal as journals
from tfdist.tuning.schedule.history import RUNNING, Sweep, Trial, finite

_REDRAWS_PER_SECOND = 5
_NUM_BEST = 5
_FRAME_LINES = 6  # the title, the table's head, and room for the prompt


class SweepTable:
    """Shows a sweep; on a terminal other prints of this process appear above the table until `close`.

    Args:
      stdout: where to show it.
      max_seconds: after how many from now the sweep ends; None: without such a limit.
      clock: seconds.

    Attributes:
      sweep: as the events tell it.
    """

    def __init__(
        self,
        stdout: TextIO | None = None,
        *,
        max_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stdout = stdout or sys.stdout
        self.sweep = Sweep()
        self._console = rich.console.Console(file=stdout, markup=False, highlight=False, emoji=False)
        is_live = stdout.isatty() and can_move_cursor(stdout)
        self._live = Live(console=self._console, auto_refresh=False) if is_live else None
        self._clock = clock
        self._started = clock()
        self._deadline = math.inf if max_seconds is None else self._started + max_seconds
        self._num_ended = 0  # since then
        self._last_line_time = self._last_redraw_time = -math.inf

    def on_event(self, event: Mapping[str, Any], *, is_replay: bool = False) -> None:
        """Takes in one event as it stands in `sweep.jsonl`; one of an earlier start shows nothing by itself."""
        self.sweep.add(event)
        if is_replay:
            return
        kind, trial = event["event"], self.sweep.by_name.get(event.get("trial", ""))
        if kind == journals.STARTED:
            self._print(sweep_line(self.sweep))
        elif kind == journals.TRIAL_STARTED and trial is not None:
            self._print(start_line(trial))
        elif kind == journals.TRIAL_ENDED and trial is not None:
            self._num_ended += 1
            self._print(" | ".join([end_line(self.sweep, trial), *self._summary()]))
        elif kind == journals.TRIAL_REPORTED and trial is not None and self._has_time_for_a_line():
            objective = math.nan if (found := finite(event["objective"])) is None else found
            epoch = f"trial {trial.name} epoch {_epoch_text(trial)}"
            self._print(f"{epoch}  {self.sweep.objective} {number_text(objective)}")
        self._draw(now=kind != journals.TRIAL_REPORTED)

    def refresh(self) -> None:
        """Shows the time that has passed; to be called now and then while nothing happens."""
        self._draw(now=False)

    def close(self) -> None:
        """Gives the terminal back with the last table on it, and names the best of a sweep that has ended."""
        self._draw(now=True)
        if self._live is not None:
            self._live.stop()
        if self.sweep.is_ended:
            self._print(last_line(self.sweep))

    def _print(self, line: str) -> None:
        self._last_line_time = self._clock()
        self._console.print(Text(line), soft_wrap=True)

    def _has_time_for_a_line(self) -> bool:
        """Whether to print the end of an epoch, which the live table shows anyway."""
        return self._live is None and self._clock() - self._last_line_time >= PROGRESS_LINE_SECONDS

    def _draw(self, *, now: bool) -> None:
        if self._live is None or not (now or self._clock() - self._last_redraw_time > 1 / _REDRAWS_PER_SECOND):
            return
        self._last_redraw_time = self._clock()
        title = [*self._summary(), duration_text(self._clock() - self._started)]
        rows = max(self._console.height - _FRAME_LINES, 3)
        self._live.start()
        self._live.update(build_table(self.sweep, " | ".join(title), rows=rows), refresh=True)

    def _summary(self) -> list[str]:
        """`7/60 trials`, `best val_accuracy 0.9544 by trial 0036`, `about 0:12:05 left`, as far as they are known."""
        sweep, over = self.sweep, sum(trial.status != RUNNING for trial in self.sweep.trials)
        parts = [count_text(over, "trial") if sweep.max_trials is None else f"{over}/{sweep.max_trials} trials"]
        parts += [] if sweep.best is None else [_best_text(sweep)]
        left = max(self._deadline - self._clock(), 0.0)
        if sweep.max_trials is not None and self._num_ended and over < sweep.max_trials:
            pace = (self._clock() - self._started) / self._num_ended
            left = min(left, pace * (sweep.max_trials - over))
        return parts if left == math.inf or sweep.is_ended else [*parts, f"about {duration_text(left)} left"]


def build_table(sweep: Sweep, title: str, *, rows: int) -> Table:
    """At most `rows` trials: the best ones, then those that run."""
    running = [trial for trial in sweep.trials if trial.status == RUNNING]
    num_best = max(min(_NUM_BEST, rows - len(running)), 1)
    best = [trial for trial in sweep.ranked if trial.status != RUNNING][:num_best]
    table = Table(title=Text(title), title_justify="left", title_style="", expand=True, padding=(0, 1), box=None)
    for name in ("trial", "state", "epoch", sweep.objective):
        table.add_column(name, no_wrap=True)
    table.add_column("values", no_wrap=True, overflow="ellipsis", ratio=1)
    for trial in [*best, *running][:rows]:
        latest = trial.curve[-1].objective if trial.status == RUNNING and trial.curve else trial.objective
        state = "best" if trial == sweep.best and trial.status != RUNNING else trial.status
        objective = "" if latest is None else number_text(latest)
        texts = [trial.name, state, _epoch_text(trial), objective, values_text(trial.values)]
        table.add_row(*(Text(printable(text)) for text in texts), style="bold" if state == "best" else "")
    return table


def sweep_line(sweep: Sweep) -> str:
    """`sweep: random for the highest val_accuracy over 6 parameters, up to 60 trials`."""
    which = "highest" if sweep.direction == "max" else "lowest"
    over = f" over {count_text(len(sweep.space), 'parameter')}" if sweep.space else ""
    limit = f", up to {count_text(sweep.max_trials, 'trial')}" if sweep.max_trials is not None else ""
    return f"sweep: {sweep.search} for the {which} {sweep.objective}{over}{limit}"


def start_line(trial: Trial) -> str:
    """`trial 0007 started  rung 1 to epoch 9  learning_rate 0.001  layers 3`."""
    target = f" to epoch {trial.target_epochs}" if trial.target_epochs is not None else ""
    again = f"continues from epoch {trial.epochs}" if trial.epochs else "started"
    return f"trial {trial.name} {again}  rung {trial.rung}{target}  {values_text(trial.values)}".rstrip()


def end_line(sweep: Sweep, trial: Trial) -> str:
    """`trial 0007 done  val_accuracy 0.9512  9 epochs  0:03:20`, and the message where there is one."""
    end = trial.ends[-1]
    objective = [] if end.objective is None else [f"{sweep.objective} {number_text(end.objective)}"]
    message = [printable(" ".join(trial.message.split()))] if trial.message else []
    figures = [count_text(trial.epochs, "epoch"), duration_text(end.seconds)]
    return "  ".join([f"trial {trial.name} {trial.status}", *objective, *figures, *message])


def last_line(sweep: Sweep) -> str:
    """`sweep ended: best val_accuracy 0.9544 by trial 0036, 60 trials in 6:38:52`."""
    best = "no trial has an objective" if sweep.best is None else _best_text(sweep)
    return f"sweep ended: {best}, {count_text(len(sweep.trials), 'trial')} in {duration_text(sweep.seconds)}"


def _best_text(sweep: Sweep) -> str:
    """`best val_accuracy 0.9544 by trial 0036`."""
    assert sweep.best is not None and sweep.best.objective is not None
    return f"best {sweep.objective} {number_text(sweep.best.objective)} by trial {sweep.best.name}"


def _epoch_text(trial: Trial) -> str:
    """`2/9`."""
    return f"{trial.epochs}" if trial.target_epochs is None else f"{trial.epochs}/{trial.target_epochs}"
