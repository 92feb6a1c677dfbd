"""What the person at the terminal sees of a sweep: a live table on a terminal, plain lines elsewhere.

Invariant: lines have no control characters; at most some five drawings a second, all by the calling thread. The sweep
opens a table in the process that leads it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TextIO

from tfdist.errors import printable
from tfdist.report.words import count_text, duration_text, values_text
from tfdist.telemetry.console.base import PROGRESS_LINE_SECONDS
from tfdist.telemetry.console.console_text import number_text
from tfdist.tuning.schedule.history import RUNNING, Event, Sweep, Trial, finite


class SweepTable:
    """What a sweep shows: its state so far, and lines of text about it.

    Args:
      stdout: where to show it.
      max_seconds: after how many from now the sweep ends; None: without such a limit.
      clock: seconds.

    Attributes:
      sweep: as the events tell it.
    """

    def __init__(
        self, stdout: TextIO, *, max_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stdout = stdout
        self._clock = clock
        self.sweep = Sweep()
        self._last_event = clock()
        self._deadline = math.inf if max_seconds is None else clock() + max_seconds

    def on_event(self, event: Event, *, is_replay: bool = False) -> None:
        """Takes in one event as it stands in `sweep.jsonl`; one of an earlier start shows nothing by itself."""
        self.sweep.add(event)
        self._last_event = self._clock()
        if not is_replay:
            self._show(event, self.sweep, self.sweep.trial(event.get("trial")))

    def refresh(self) -> None:
        """Shows the time that has passed; to be called now and then while nothing happens."""

    def close(self) -> None:
        """Gives the terminal back and leaves the last table on it. Closing again does nothing."""

    def _show(self, event: Event, sweep: Sweep, trial: Trial | None) -> None:
        raise NotImplementedError

    def _seconds(self) -> float:
        """The sweep's working time up to now."""
        return self.sweep.seconds + self._clock() - self._last_event

    def _seconds_left(self) -> float | None:
        """Until `max_trials` have ended once at the pace so far, or `max_seconds` are over, if that is sooner.

        None where there is neither such a number, with a pace, nor a limit. Later rungs nobody can count.
        """
        over, max_trials = sum(trial.status != RUNNING for trial in self.sweep.trials), self.sweep.max_trials
        left = max(self._deadline - self._clock(), 0.0)
        if max_trials is not None and 0 < over < max_trials:
            left = min(left, self._seconds() / over * (max_trials - over))
        return None if left == math.inf else left


class PlainTable(SweepTable):
    """`SweepTable` in lines: one when a trial starts and one when it ends, and of the epochs one in ten seconds."""

    _last_line_time = -math.inf

    def _show(self, event: Event, sweep: Sweep, trial: Trial | None) -> None:
        kind = event.get("event")
        if kind == "sweep_started":
            self._write(sweep_line(sweep))
        elif kind == "sweep_ended":
            self._write(end_line(sweep))
        elif trial is None:
            return
        elif kind == "trial_started":
            self._write(start_line(trial))
        elif kind == "trial_ended":
            self._write(" | ".join([trial_line(sweep, trial), *summary(sweep, seconds_left=self._seconds_left())]))
        elif kind == "trial_reported" and self._clock() - self._last_line_time >= PROGRESS_LINE_SECONDS:
            objective = objective_text(finite(event.get("objective")))
            self._write(f"trial {trial.name} epoch {epoch_text(trial)}  {sweep.objective} {objective}")

    def _write(self, line: str) -> None:
        self._last_line_time = self._clock()
        self._stdout.write(f"{line}\n")
        self._stdout.flush()


def sweep_line(sweep: Sweep) -> str:
    """`sweep: random for the highest val_accuracy over 6 parameters, up to 60 trials`."""
    which = "highest" if sweep.direction == "max" else "lowest"
    most = f", up to {count_text(sweep.max_trials, 'trial')}" if sweep.max_trials is not None else ""
    count = len(sweep.parameters)
    over = f" over {count_text(count, 'parameter')}" if count else ""
    return f"sweep: {sweep.search or 'search'} for the {which} {sweep.objective}{over}{most}"


def start_line(trial: Trial) -> str:
    """`trial 0007 started  rung 1 to epoch 9  learning_rate 0.001  layers 3`."""
    target = f" to epoch {trial.target_epochs}" if trial.target_epochs is not None else ""
    again = f"continues from epoch {trial.epochs}" if trial.epochs else "started"
    return f"trial {trial.name} {again}  rung {trial.rung}{target}  {values_text(trial.values)}".rstrip()


def trial_line(sweep: Sweep, trial: Trial) -> str:
    """`trial 0007 done  val_accuracy 0.9512  9 epochs  0:03:20`, and the message where there is one."""
    end = trial.ends[-1]
    parts = [f"trial {trial.name} {trial.status}"]
    if end.objective is not None:
        parts.append(f"{sweep.objective} {number_text(end.objective)}")
    parts += [count_text(trial.epochs, "epoch"), duration_text(end.seconds)]
    if trial.message:
        parts.append(printable(" ".join(trial.message.split())))
    return "  ".join(parts)


def end_line(sweep: Sweep) -> str:
    """`sweep ended: best val_accuracy 0.9544 by trial 0036, 60 trials in 6:38:52`."""
    best = sweep.best
    found = "no trial has an objective" if best is None else f"best {best_text(sweep)}"
    return f"sweep ended: {found}, {count_text(len(sweep.trials), 'trial')} in {duration_text(sweep.seconds)}"


def summary(sweep: Sweep, *, seconds_left: float | None) -> list[str]:
    """`7/60 trials`, `best val_accuracy 0.9544 by trial 0036`, `about 0:12:05 left`, as far as they are known."""
    over = sum(trial.status != RUNNING for trial in sweep.trials)
    parts = [count_text(over, "trial") if sweep.max_trials is None else f"{over}/{sweep.max_trials} trials"]
    if sweep.best is not None:
        parts.append(f"best {best_text(sweep)}")
    if seconds_left is not None and not sweep.is_ended:
        parts.append(f"about {duration_text(seconds_left)} left")
    return parts


def best_text(sweep: Sweep) -> str:
    """`val_accuracy 0.9544 by trial 0036`."""
    best = sweep.best
    return "" if best is None else f"{sweep.objective} {objective_text(best.objective)} by trial {best.name}"


def objective_text(objective: float | None) -> str:
    """An objective; `nan` where there is none."""
    return "nan" if objective is None else number_text(objective)


def epoch_text(trial: Trial) -> str:
    """`2/9`."""
    return f"{trial.epochs}" if trial.target_epochs is None else f"{trial.epochs}/{trial.target_epochs}"
