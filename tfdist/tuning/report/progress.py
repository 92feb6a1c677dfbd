"""What one sees of a sweep while it runs: a line for each start and end of a trial, and TensorBoard's HParams table.

Invariant: lines have no control characters; TensorBoard finds out itself what is varied and measured, and a trial's
metrics are what its own run wrote.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.errors import printable
from tfdist.telemetry.console.console import PROGRESS_LINE_SECONDS
from tfdist.telemetry.console.console_text import count_text, duration_text, number_text, values_text
from tfdist.telemetry.metrics_log import LAST, store_summaries
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.schedule import journal as journals
from tfdist.tuning.schedule.journal import DONE, FAILED, INFEASIBLE, INTERRUPTED, RUNNING, STOPPED, Sweep, Trial


@dataclasses.dataclass
class SweepProgress:
    """Prints a sweep, line by line.

    Attributes:
      show: prints a line.
      max_seconds: after how many from now the sweep ends; None: without such a limit.
      clock: seconds.
      sweep: as the events tell it.
    """

    show: Callable[[str], None]
    max_seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    sweep: Sweep = dataclasses.field(default_factory=Sweep)

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._deadline = math.inf if self.max_seconds is None else self._started + self.max_seconds
        self._num_ended = 0  # since then
        self._last_line_time = -math.inf

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Takes in one event as it stands in `sweep.jsonl`; one of an earlier start goes to `sweep` alone."""
        self.sweep.add(event)
        kind, trial = event["event"], self.sweep.by_name.get(event.get("trial", ""))
        if kind == journals.STARTED:
            self._print(sweep_line(self.sweep))
        elif kind == journals.ENDED:
            self._print(last_line(self.sweep))
        elif kind == journals.TRIAL_STARTED and trial is not None:
            self._print(start_line(trial))
        elif kind == journals.TRIAL_ENDED and trial is not None:
            self._num_ended += trial.status != INTERRUPTED
            self._print(" | ".join([end_line(self.sweep, trial), *self._summary()]))
        elif trial is not None and self.clock() - self._last_line_time >= PROGRESS_LINE_SECONDS:
            target = "" if trial.target_epochs is None else f"/{trial.target_epochs}"
            objective = number_text(float(event["objective"]))
            self._print(f"trial {trial.name} epoch {trial.epochs}{target}  {self.sweep.objective} {objective}")

    def _print(self, line: str) -> None:
        self._last_line_time = self.clock()
        self.show(printable(line))

    def _summary(self) -> list[str]:
        """`7/60 trials`, `best val_accuracy 0.9544 by trial 0036`, `about 0:12:05 left`, as far as they are known."""
        sweep, over = self.sweep, sum(trial.status not in (RUNNING, INTERRUPTED) for trial in self.sweep.trials)
        parts = [count_text(over, "trial") if sweep.max_trials is None else f"{over}/{sweep.max_trials} trials"]
        parts += [] if sweep.best is None else [_best_text(sweep)]
        left = max(self._deadline - self.clock(), 0.0)
        if self._num_ended and sweep.max_trials is not None and over < sweep.max_trials:
            pace = (self.clock() - self._started) / self._num_ended
            left = min(left, pace * (sweep.max_trials - over))
        return parts if left == math.inf else [*parts, f"about {duration_text(left)} left"]


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
    message = [" ".join(trial.message.split())] if trial.message else []
    figures = [count_text(trial.epochs, "epoch"), duration_text(end.seconds)]
    return "  ".join([f"trial {trial.name} {trial.status}", *objective, *figures, *message])


def last_line(sweep: Sweep) -> str:
    """`sweep ended: best val_accuracy 0.9544 by trial 0036, 60 trials in 6:38:52`."""
    best = "no trial has an objective" if sweep.best is None else _best_text(sweep)
    return f"sweep ended: {best}, {count_text(len(sweep.trials), 'trial')} in {duration_text(sweep.seconds)}"


def explain_no_best(sweep: Sweep) -> str:
    """`No trial has a val_accuracy, so best.gin is not written. 3 of 4 trials: Training diverged at step 7.`"""
    ((message, count),) = collections.Counter(trial.message for trial in sweep.trials).most_common(1)
    ended = f"{count} of {count_text(len(sweep.trials), 'trial')}: {' '.join(message.split())}"
    return f"No trial has a {sweep.objective}, so best.gin is not written. {ended}"


def _best_text(sweep: Sweep) -> str:
    """`best val_accuracy 0.9544 by trial 0036`."""
    assert sweep.best is not None and sweep.best.objective is not None
    return f"best {sweep.objective} {number_text(sweep.best.objective)} by trial {sweep.best.name}"


def write_hparams(directory: RunDirectory, trial: Trial, event: Mapping[str, Any], space: Mapping[str, Any]) -> None:
    """Adds a trial that has ended, with its values and whether it succeeded, to TensorBoard's HParams table.

    Args:
      directory: of the trial.
      event: of its end, as it stands in `sweep.jsonl`.
      space: as `Space.describe` has it.

    Raises:
      OSError: the directory cannot be written.
    """
    from tensorboard.plugins.hparams import api, api_pb2, summary

    ends = dict.fromkeys((DONE, STOPPED), api_pb2.STATUS_SUCCESS)
    ends |= dict.fromkeys((FAILED, INFEASIBLE), api_pb2.STATUS_FAILURE)
    if trial.status not in ends:  # it continues
        return
    seconds = datetime.datetime.fromisoformat(event["time"]).timestamp()
    shown = {name: _as_simple(value, space.get(name, {})) for name, value in trial.values.items()}
    start = api.hparams_pb(shown, trial_id=trial.name, start_time_secs=seconds - event["seconds"])
    end = summary.session_end_pb(ends[trial.status], end_time_secs=seconds)
    store_summaries(directory.tensorboard, f"{LAST}.hparams", [start, end], time=seconds)


def _as_simple(value: Any, about: Mapping[str, Any]) -> bool | int | float | str:
    """A value as TensorBoard takes it, which wants all of a parameter's of one simple kind."""
    kinds = {type(each) for each in about.get("values", [value])}
    return value if len(kinds) == 1 and isinstance(value, bool | int | float | str) else str(value)
