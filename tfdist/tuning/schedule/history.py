"""Reads what a sweep wrote into `sweep.jsonl` as frozen dataclasses.

Invariant: a journal is readable at any moment: while the sweep writes, after a kill, after a restart. Events of a kind
that is not known are passed over; lines that are no events are counted in `Sweep.num_unreadable_lines`. The table
feeds events one by one through `History`, the report reads them all with `read_sweep`.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.records import Unreadable, read_lines
from tfdist.telemetry.run_directory import RunDirectory

Direction = Literal["max", "min"]
Event = Mapping[str, Any]
RUNNING = "running"
# An objective counts where the trial ended in one of these; what an interrupted one reported may still be overtaken.
_JUDGED = ("done", "paused", "stopped")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    curve: tuple[Point, ...] = ()
    ends: tuple[End, ...] = ()
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """Whether its objective may be compared: it ended well at least once."""
        return self.objective is not None and self.status not in ("infeasible", "failed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A whole sweep so far; trials in the order in which they first started."""

    objective: str = "objective"
    direction: Direction = "max"
    search: str = ""
    parameters: tuple[Parameter, ...] = ()
    max_trials: int | None = None
    trials: tuple[Trial, ...] = ()
    is_ended: bool = False
    named_best: str | None = None
    started: str = ""
    seconds: float = 0.0
    num_unreadable_lines: int = 0

    @property
    def judged(self) -> tuple[Trial, ...]:
        """The trials with an objective that counts."""
        return tuple(trial for trial in self.trials if trial.is_judged)

    @property
    def ranked(self) -> tuple[Trial, ...]:
        """`judged`, the best first; of equals the earlier."""
        sign = -1.0 if self.direction == "max" else 1.0
        return tuple(sorted(self.judged, key=lambda trial: sign * (trial.objective or 0.0)))

    @property
    def best(self) -> Trial | None:
        """The trial that the sweep named at its end; before that the one with the best objective, on any rung."""
        named = (trial for trial in self.judged if trial.name == self.named_best)
        return next(named, next(iter(self.ranked), None))


def read_sweep(run_dir: str) -> Sweep:
    """The sweep of a run directory, local or `gs://`; raises UserError where there is none."""
    path = RunDirectory(run_dir).sweep
    if not files.exists(path):
        raise UserError(
            f"There is no sweep in {str(run_dir)!r}: {path} is missing. Name the run directory of --mode=tune."
        )
    history, unreadable = History(), Unreadable()
    for event in read_lines(path, unreadable):
        history.add(event)
    return dataclasses.replace(history.sweep, num_unreadable_lines=unreadable.lines)


class History:
    """Grows a `Sweep` by events, in the order of the journal."""

    def __init__(self) -> None:
        self._head = Sweep()
        self._trials: dict[str, Trial] = {}
        self._last_time: datetime.datetime | None = None
        self._seconds = 0.0

    @property
    def sweep(self) -> Sweep:
        return dataclasses.replace(self._head, trials=tuple(self._trials.values()), seconds=self._seconds)

    @property
    def seconds(self) -> float:
        """The working time up to the last event."""
        return self._seconds

    def trial(self, name: str) -> Trial | None:
        return self._trials.get(name)

    def add(self, event: Event) -> None:
        """Takes in one event; one of an unknown kind changes nothing."""
        kind = event.get("event")
        self._pass_time(event.get("time"), is_pause=kind == "sweep_started")
        if kind == "sweep_started":
            self._start(event)
        elif kind == "sweep_ended":
            self._head = dataclasses.replace(self._head, is_ended=True, named_best=event.get("best"))
        elif kind in _TRIAL_EVENTS and "trial" in event:
            name = str(event["trial"])
            trial = self._trials.get(name) or Trial(name=name)
            self._trials[name] = _TRIAL_EVENTS[kind](trial, event, self._seconds)

    def _start(self, event: Event) -> None:
        # Whatever ran when the last chief ended runs no more.
        for name, trial in self._trials.items():
            if trial.status == RUNNING:
                self._trials[name] = dataclasses.replace(trial, status="interrupted")
        self._head = Sweep(
            objective=str(event.get("objective") or "objective"),
            direction="min" if event.get("direction") == "min" else "max",
            search=str(event.get("search") or ""),
            parameters=tuple(_parameter(path, entry) for path, entry in (event.get("space") or {}).items()),
            max_trials=_whole(event.get("max_trials")),
            started=self._head.started or str(event.get("time") or ""),
        )

    def _pass_time(self, time: Any, *, is_pause: bool) -> None:
        try:
            now = datetime.datetime.fromisoformat(time)
        except (TypeError, ValueError):
            return
        now = now if now.tzinfo else now.replace(tzinfo=datetime.UTC)
        if self._last_time is not None and not is_pause:
            self._seconds += max((now - self._last_time).total_seconds(), 0.0)
        self._last_time = now if self._last_time is None or is_pause else max(now, self._last_time)


def _started(trial: Trial, event: Event, seconds: float) -> Trial:
    return dataclasses.replace(
        trial,
        values=event.get("values") or trial.values,
        status=RUNNING,
        rung=_whole(event.get("rung")) or 0,
        target_epochs=_whole(event.get("epochs")),
        worker=_whole(event.get("worker")),
        host=str(event["host"]) if event.get("host") else None,
        message="",
    )


def _reported(trial: Trial, event: Event, seconds: float) -> Trial:
    epoch, step = _whole(event.get("epoch")) or 0, _whole(event.get("step")) or 0
    objective = finite(event.get("objective"))
    curve = tuple(point for point in trial.curve if (point.epoch, point.step) < (epoch, step))
    if objective is not None:
        curve += (Point(epoch, objective, trial.rung, step),)
    return dataclasses.replace(
        trial, curve=curve, epochs=max(trial.epochs, epoch), metrics=event.get("metrics") or trial.metrics
    )


def _ended(trial: Trial, event: Event, seconds: float) -> Trial:
    rung = _whole(event.get("rung"))
    end = End(
        status=str(event.get("status") or "done"),
        rung=trial.rung if rung is None else rung,
        objective=finite(event.get("objective")),
        epochs=_whole(event.get("epochs")) or 0,
        seconds=finite(event.get("seconds")) or 0.0,
        at_seconds=seconds,
    )
    return dataclasses.replace(
        trial,
        values=event.get("values") or trial.values,
        status=end.status,
        rung=end.rung,
        epochs=max(trial.epochs, end.epochs),
        seconds=trial.seconds + end.seconds,
        objective=end.objective if end.is_judged else trial.objective,
        message=str(event.get("message") or ""),
        ends=(*trial.ends, end),
    )


_TRIAL_EVENTS: dict[Any, Callable[[Trial, Event, float], Trial]] = {
    "trial_started": _started,
    "trial_reported": _reported,
    "trial_ended": _ended,
}


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
