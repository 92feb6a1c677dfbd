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

from tfdist.telemetry.console import PROGRESS_LINE_SECONDS
from tfdist.telemetry.console_text import number_text
from tfdist.tuning.history import RUNNING, Event, History, Sweep, Trial, finite
from tfdist.tuning.words import duration_text, values_text


class SweepTable(Protocol):
    """What a sweep tells."""

    def on_event(self, event: Event, *, is_replay: bool = False) -> None:
        """Takes in one event as it stands in `sweep.jsonl`."""

    def refresh(self) -> None:
        """Shows the time that has passed; to be called now and then while nothing happens."""

    def close(self) -> None:
        """Gives the terminal back and leaves the last table on it. Closing again does nothing."""


def open_table(stdout: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> SweepTable:
    """The table on a terminal that can move its cursor, else lines."""
    stdout = stdout or sys.stdout
    if stdout.isatty():
        from tfdist.telemetry.progress_bar import can_move_cursor

        if can_move_cursor(stdout):
            from tfdist.tuning.live_table import LiveTable

            return LiveTable(stdout, clock=clock)
    return PlainTable(stdout, clock=clock)


class Watch:
    """The sweep so far, with the time since its last event; both tables look at it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.history = History()
        self._clock = clock
        self._last_event = clock()

    def add(self, event: Event) -> None:
        self.history.add(event)
        self._last_event = self._clock()

    def seconds(self) -> float:
        """The sweep's working time up to now."""
        return self.history.seconds + self._clock() - self._last_event

    def seconds_left(self) -> float | None:
        """Until `max_trials` have ended once at the pace so far.

        None where there is no such number or no pace yet, and when only later rungs are left, which nobody can count.
        """
        sweep = self.history.sweep
        over = sum(trial.status != RUNNING for trial in sweep.trials)
        if sweep.max_trials is None or not 0 < over < sweep.max_trials:
            return None
        return self.seconds() / over * (sweep.max_trials - over)


class PlainTable:
    """`SweepTable` in lines: one when a trial starts and one when it ends, and of the epochs one in ten seconds."""

    def __init__(self, stdout: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stdout = stdout
        self._clock = clock
        self._watch = Watch(clock)
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


def sweep_line(sweep: Sweep) -> str:
    """`sweep: asha for the highest val_accuracy over 6 parameters, up to 60 trials`."""
    which = "highest" if sweep.direction == "max" else "lowest"
    most = f", up to {sweep.max_trials} trials" if sweep.max_trials is not None else ""
    count = len(sweep.parameters)
    over = f" over {count} {'parameter' if count == 1 else 'parameters'}" if count else ""
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
    parts += [f"{trial.epochs} {'epoch' if trial.epochs == 1 else 'epochs'}", duration_text(end.seconds)]
    if trial.message:
        parts.append(" ".join(trial.message.split()))
    return "  ".join(parts)


def end_line(sweep: Sweep) -> str:
    """`sweep ended: best val_accuracy 0.9544 by trial 0036, 60 trials in 6:38:52`."""
    best = sweep.best
    found = "no trial has an objective" if best is None else f"best {best_text(sweep)}"
    return f"sweep ended: {found}, {len(sweep.trials)} trials in {duration_text(sweep.seconds)}"


def summary(sweep: Sweep, *, seconds_left: float | None) -> list[str]:
    """`7/60 trials`, `best val_accuracy 0.9544 by trial 0036`, `about 0:12:05 left`, as far as they are known."""
    over = sum(trial.status != RUNNING for trial in sweep.trials)
    parts = [f"{over} trials" if sweep.max_trials is None else f"{over}/{sweep.max_trials} trials"]
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
    return "nan" if objective is None else number_text(objective)


def epoch_text(trial: Trial) -> str:
    """`2/9`."""
    return f"{trial.epochs}" if trial.target_epochs is None else f"{trial.epochs}/{trial.target_epochs}"
