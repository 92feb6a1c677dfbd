"""What became of a sweep, as its journal `sweep.jsonl` tells it: the one model of a sweep and its trials.

Invariant: a journal is readable at any moment: while the sweep writes, after a kill, after a restart. Events of a kind
that is not known are passed over; lines that are no events are counted in `Sweep.num_unreadable_lines`. The sweep and
its table add each event as it is written, the report reads them all with `read_sweep`. Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping
from typing import Any, Literal

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.records import Unreadable, read_lines
from tfdist.telemetry.run_directory import RunDirectory

Direction = Literal["max", "min"]
Event = Mapping[str, Any]
RUNNING, INTERRUPTED = "running", "interrupted"
DONE, PAUSED, STOPPED, INFEASIBLE, FAILED = "done", "paused", "stopped", "infeasible", "failed"
# An objective counts where the trial ended in one of these; what an interrupted one reported may still be overtaken.
_JUDGED = (DONE, PAUSED, STOPPED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of the space: `path` is its binding, `under` the parents' values under which alone it exists."""

    path: str
    kind: str
    low: float | None = None
    high: float | None = None
    values: tuple[Any, ...] = ()
    under: Mapping[str, Any] | None = None

    @property
    def is_number(self) -> bool:
        """Whether its values lie on an axis, and are not names of things."""
        return self.low is not None and self.high is not None

    @property
    def is_logarithmic(self) -> bool:
        """Whether its axis is one of decades."""
        return self.kind == "log_uniform" and self.low is not None and self.low > 0

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values it can take one of, in the order of the space; none for numbers."""
        return (False, True) if self.kind == "boolean" and not self.values else self.values


@dataclasses.dataclass(frozen=True)
class Point:
    """What a trial reported: the objective after `epoch` epochs; `step` is 0 where the journal names none."""

    epoch: int
    objective: float
    rung: int
    step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How one stretch of a trial ended. `at_seconds` is the sweep's working time then, pauses between starts apart."""

    status: str
    rung: int
    objective: float | None
    epochs: int
    seconds: float
    at_seconds: float

    @property
    def is_judged(self) -> bool:
        """Whether its objective may be compared."""
        return self.objective is not None and self.status in _JUDGED


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
    worker: int | None = None
    host: str | None = None
    curve: list[Point] = dataclasses.field(default_factory=list)
    ends: list[End] = dataclasses.field(default_factory=list)
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """Whether its objective may be compared: it ended well at least once."""
        return self.objective is not None and self.status not in (INFEASIBLE, FAILED)

    def start(self, event: Event) -> None:
        """Takes in that it runs."""
        self.values, self.status = event.get("values") or self.values, RUNNING
        self.rung, self.target_epochs = _whole(event.get("rung")) or 0, _whole(event.get("epochs"))
        self.worker, self.message = _whole(event.get("worker")), ""
        self.host = str(event["host"]) if event.get("host") else None

    def report(self, event: Event) -> None:
        """Takes in an evaluation."""
        epoch, step = _whole(event.get("epoch")) or 0, _whole(event.get("step")) or 0
        self.curve = [point for point in self.curve if (point.epoch, point.step) < (epoch, step)]
        if (objective := finite(event.get("objective"))) is not None:
            self.curve.append(Point(epoch, objective, self.rung, step))
        self.epochs, self.metrics = max(self.epochs, epoch), event.get("metrics") or self.metrics

    def end(self, event: Event, at_seconds: float) -> None:
        """Takes in the end of a stretch."""
        rung = _whole(event.get("rung"))
        end = End(
            status=str(event.get("status") or DONE),
            rung=self.rung if rung is None else rung,
            objective=finite(event.get("objective")),
            epochs=_whole(event.get("epochs")) or 0,
            seconds=finite(event.get("seconds")) or 0.0,
            at_seconds=at_seconds,
        )
        self.ends.append(end)
        self.values, self.message = event.get("values") or self.values, str(event.get("message") or "")
        self.status, self.rung, self.epochs = end.status, end.rung, max(self.epochs, end.epochs)
        self.seconds += end.seconds
        self.objective = end.objective if end.is_judged else self.objective


@dataclasses.dataclass(kw_only=True)
class Sweep:
    """A whole sweep so far, which grows by the events of the journal in their order.

    Attributes:
      seconds: the working time up to the last event.
    """

    objective: str = "objective"
    direction: Direction = "max"
    search: str = ""
    parameters: tuple[Parameter, ...] = ()
    max_trials: int | None = None
    is_ended: bool = False
    started: str = ""
    seconds: float = 0.0
    num_unreadable_lines: int = 0
    _trials: dict[str, Trial] = dataclasses.field(default_factory=dict)
    _last_time: datetime.datetime | None = None

    @property
    def trials(self) -> list[Trial]:
        """In the order in which they first started."""
        return list(self._trials.values())

    @property
    def judged(self) -> list[Trial]:
        """The trials with an objective that counts."""
        return [trial for trial in self.trials if trial.is_judged]

    @property
    def ranked(self) -> list[Trial]:
        """`judged`, the best first; of equals the earlier."""
        sign = -1.0 if self.direction == "max" else 1.0
        return sorted(self.judged, key=lambda trial: sign * (trial.objective or 0.0))

    @property
    def best(self) -> Trial | None:
        """The best trained to its end; where none was, the best of those that were stopped or paused."""
        ranked = self.ranked
        return next((trial for trial in ranked if trial.status == DONE), next(iter(ranked), None))

    def trial(self, name: Any) -> Trial | None:
        """The trial of this name, if there is one."""
        return self._trials.get(str(name))

    def add(self, event: Event) -> None:
        """Takes in one event; one of an unknown kind changes nothing."""
        kind = event.get("event")
        self._pass_time(event.get("time"), is_pause=kind == "sweep_started")
        self.is_ended = kind == "sweep_ended" or (self.is_ended and kind != "sweep_started")
        if kind == "sweep_started":
            self._start(event)
        elif kind in ("trial_started", "trial_reported", "trial_ended") and "trial" in event:
            name = str(event["trial"])
            trial = self._trials.setdefault(name, Trial(name=name))
            if kind == "trial_started":
                trial.start(event)
            elif kind == "trial_reported":
                trial.report(event)
            else:
                trial.end(event, self.seconds)

    def _start(self, event: Event) -> None:
        for trial in self.trials:  # whatever ran when the last chief ended runs no more
            trial.status = INTERRUPTED if trial.status == RUNNING else trial.status
        self.objective = str(event.get("objective") or "objective")
        self.direction = "min" if event.get("direction") == "min" else "max"
        self.search = str(event.get("search") or "")
        self.parameters = tuple(_parameter(path, entry) for path, entry in (event.get("space") or {}).items())
        self.max_trials = _whole(event.get("max_trials"))
        self.started = self.started or str(event.get("time") or "")

    def _pass_time(self, time: Any, *, is_pause: bool) -> None:
        try:
            now = datetime.datetime.fromisoformat(time)
        except (TypeError, ValueError):
            return
        now = now if now.tzinfo else now.replace(tzinfo=datetime.UTC)
        if self._last_time is not None and not is_pause:
            self.seconds += max((now - self._last_time).total_seconds(), 0.0)
        self._last_time = now if self._last_time is None or is_pause else max(now, self._last_time)


def read_sweep(run_dir: str) -> Sweep:
    """The sweep of a run directory, local or `gs://`; raises UserError where there is none."""
    path = RunDirectory(run_dir).sweep
    if not files.exists(path):
        raise UserError(
            f"There is no sweep in {str(run_dir)!r}: {path} is missing. Name the run directory of --mode=tune."
        )
    sweep, unreadable = Sweep(), Unreadable()
    for event in read_lines(path, unreadable):
        sweep.add(event)
    sweep.num_unreadable_lines = unreadable.lines
    return sweep


def finite(value: Any) -> float | None:
    """A number as float; None for what is none, for NaN and the infinities, also where they are written as text."""
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _parameter(path: str, entry: Mapping[str, Any]) -> Parameter:
    return Parameter(
        path=path,
        kind="log_uniform" if entry.get("sampling") == "log" else str(entry.get("kind") or "choice"),
        low=finite(entry.get("low")),
        high=finite(entry.get("high")),
        values=tuple(entry.get("values") or ()),
        under=entry.get("under") or None,
    )


def _whole(value: Any) -> int | None:
    number = finite(value)
    return None if number is None else int(number)
