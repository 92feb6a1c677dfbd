"""Words and figures of a sweep on the terminal, and the time it has left.

Invariant: one line each, without control characters. The live table and the plain lines share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tfdist.errors import printable
from tfdist.report.words import count_text, duration_text, values_text
from tfdist.telemetry.console.console_text import number_text
from tfdist.tuning.schedule.history import RUNNING, Event, History, Sweep, Trial


class Watch:
    """The sweep so far, with the time since its last event; both tables look at it.

    Args:
      clock: seconds.
      max_seconds: after how many from now the sweep ends; None: without such a limit.
    """

    def __init__(self, clock: Callable[[], float], max_seconds: float | None = None) -> None:
        self.history = History()
        self._clock = clock
        self._last_event = clock()
        self._deadline = math.inf if max_seconds is None else clock() + max_seconds

    def add(self, event: Event) -> None:
        self.history.add(event)
        self._last_event = self._clock()

    def seconds(self) -> float:
        """The sweep's working time up to now."""
        return self.history.seconds + self._clock() - self._last_event

    def seconds_left(self) -> float | None:
        """Until `max_trials` have ended once at the pace so far, or `max_seconds` are over, if that is sooner.

        None where there is neither such a number, with a pace, nor a limit. Later rungs nobody can count.
        """
        sweep = self.history.sweep
        over = sum(trial.status != RUNNING for trial in sweep.trials)
        left = max(self._deadline - self._clock(), 0.0)
        if sweep.max_trials is not None and 0 < over < sweep.max_trials:
            left = min(left, self.seconds() / over * (sweep.max_trials - over))
        return None if left == math.inf else left


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
