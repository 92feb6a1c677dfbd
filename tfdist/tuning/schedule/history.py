"""What became of a sweep, as its journal `sweep.jsonl` tells it.

Invariant: a journal is readable at any moment: while the sweep writes, after a kill, after a restart. Events of a kind
that is not known change nothing; lines that are no events are counted in `Sweep.num_unreadable_lines`. The sweep's
table adds each event as it is written, the report reads them all with `read_sweep`. Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping
from typing import Any

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.records import DamagedFileError, Unreadable, read_lines
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.schedule import journal as journals

RUNNING, INTERRUPTED = "running", "interrupted"
DONE, PAUSED, STOPPED, INFEASIBLE, FAILED = "done", "paused", "stopped", "infeasible", "failed"


@dataclasses.dataclass(frozen=True)
class Point:
    """The objective that a trial reported after `epoch` epochs, at `step`."""

    epoch: int
    step: int
    objective: float


@dataclasses.dataclass(frozen=True)
class End:
    """How one stretch of a trial ended, `at_seconds` after the sweep began; the objective counts where there is one."""

    objective: float | None
    seconds: float
    at_seconds: float


@dataclasses.dataclass(kw_only=True)
class Trial:
    """One trial with all its stretches: a paused or interrupted one started again.

    `status` is that of the last stretch, "running" while it has not ended. `objective` is that of the last end that
    had one, None before. `epochs` are those trained in all, `target_epochs` those of the rung; `seconds` are the sum
    over the stretches. `host` is the node of the last one, None on the sweep's own machine. The curve's epochs never
    go back: what is trained again replaces what was there.
    """

    name: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    status: str = RUNNING
    rung: int = 0
    epochs: int = 0
    target_epochs: int | None = None
    seconds: float = 0.0
    objective: float | None = None
    message: str = ""
    host: str | None = None
    curve: list[Point] = dataclasses.field(default_factory=list)
    ends: list[End] = dataclasses.field(default_factory=list)

    @property
    def has_result(self) -> bool:
        """Whether its objective may be compared: it ended well at least once."""
        return self.objective is not None and self.status not in (INFEASIBLE, FAILED)

    def start(self, event: Mapping[str, Any]) -> None:
        """Takes in that it runs."""
        self.values, self.status, self.message = event["values"], RUNNING, ""
        self.rung, self.target_epochs, self.host = event["rung"], event.get("epochs"), event.get("host")

    def report(self, event: Mapping[str, Any]) -> None:
        """Takes in an evaluation."""
        epoch, step = event["epoch"], event["step"]
        self.curve = [point for point in self.curve if (point.epoch, point.step) < (epoch, step)]
        if (objective := finite(event["objective"])) is not None:
            self.curve.append(Point(epoch, step, objective))
        self.epochs = max(self.epochs, epoch)

    def end(self, event: Mapping[str, Any], at_seconds: float) -> None:
        """Takes in the end of a stretch; what an interrupted one reported may still be overtaken."""
        self.status, self.message, seconds = event["status"], event["message"], event.get("seconds", 0.0)
        objective = finite(event["objective"]) if self.status in (DONE, PAUSED, STOPPED) else None
        self.ends.append(End(objective, seconds, at_seconds))
        self.values, self.rung = event.get("values", self.values), event.get("rung", self.rung)
        self.epochs, self.seconds = max(self.epochs, event.get("epochs", 0)), self.seconds + seconds
        self.objective = self.objective if objective is None else objective


@dataclasses.dataclass(kw_only=True)
class Sweep:
    """A whole sweep so far, which grows by the events of the journal in their order.

    Attributes:
      space: as `Space.describe` has it.
      started: when, as ISO 8601 has it.
      seconds: from there to the last event.
    """

    objective: str = "objective"
    direction: str = "max"
    search: str = ""
    space: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    max_trials: int | None = None
    is_ended: bool = False
    started: str = ""
    seconds: float = 0.0
    num_unreadable_lines: int = 0
    by_name: dict[str, Trial] = dataclasses.field(default_factory=dict)

    @property
    def trials(self) -> list[Trial]:
        """In the order in which they first started."""
        return list(self.by_name.values())

    @property
    def ranking(self) -> list[Trial]:
        """The trials with an objective that counts, the best first; of equals the earlier."""
        sign = -1.0 if self.direction == "max" else 1.0
        judged = [trial for trial in self.trials if trial.has_result]
        return sorted(judged, key=lambda trial: sign * (trial.objective or 0.0))

    @property
    def best(self) -> Trial | None:
        """The best trained to its end; where none was, the best of those that were stopped or paused."""
        ranked = self.ranking
        return next((trial for trial in ranked if trial.status == DONE), next(iter(ranked), None))

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes in one event; one of an unknown kind changes nothing."""
        kind, time = event["event"], event["time"]
        self.started = self.started or time
        seconds = (_parse_time(time) - _parse_time(self.started)).total_seconds()
        self.seconds, self.is_ended = max(self.seconds, seconds), kind == journals.ENDED
        if kind == journals.STARTED:
            self.objective, self.direction, self.search = event["objective"], event["direction"], event["search"]
            self.space, self.max_trials = event["space"], event.get("max_trials")
        elif kind in (journals.TRIAL_STARTED, journals.TRIAL_REPORTED, journals.TRIAL_ENDED):
            trial = self.by_name.setdefault(event["trial"], Trial(name=event["trial"]))
            if kind == journals.TRIAL_STARTED:
                trial.start(event)
            elif kind == journals.TRIAL_REPORTED:
                trial.report(event)
            else:
                trial.end(event, self.seconds)


def read_sweep(run_dir: str) -> Sweep:
    """The sweep of a run directory, local or `gs://`; raises UserError where there is none."""
    path = RunDirectory(run_dir).sweep
    if not files.exists(path):
        raise UserError(
            f"There is no sweep in {str(run_dir)!r}: {path} is missing. Name the run directory of --mode=tune.",
            error_id="missing-run",
        )
    sweep, unreadable = Sweep(), Unreadable()
    for event in read_lines(path, unreadable):
        try:
            journals.check_event(path, event)
        except DamagedFileError:
            unreadable.lines += 1
        else:
            sweep.add(event)
    sweep.num_unreadable_lines = unreadable.lines
    return sweep


def finite(value: float | str | None) -> float | None:
    """An objective as a number; None where there is none, for NaN and the infinities, which JSON has as text."""
    return None if value is None or not math.isfinite(float(value)) else float(value)


def _parse_time(text: str) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
