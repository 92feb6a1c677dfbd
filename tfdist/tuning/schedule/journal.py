"""sweep.jsonl: what happened in a sweep, in order, for a chief that is started again, and for reports.

Invariant: an event is in the journal before the oracle is told of it and before anybody acts on it; nothing is ever
rewritten. `asked` on an event that the oracle is told of is how often it had been asked for values before, which is
all that it takes to give it the same calls in the same order again. Written by the chief alone.

A journal is readable at any moment: while the sweep writes, after a kill, after a restart. Events of a kind that is not
known change nothing in a `Sweep`; lines that are no events are counted. Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.errors import build_user_error
from tfdist.storage import files
from tfdist.storage.logs import LogSink
from tfdist.telemetry.json_text import from_json, to_json
from tfdist.telemetry.records import (
    DamagedFileError,
    NewerFormatError,
    Unreadable,
    as_type,
    build_damage_error,
    parse_line,
    read_lines,
)
from tfdist.telemetry.run_directory import RunDirectory

STARTED, RESUMED, ENDED = "sweep_started", "sweep_resumed", "sweep_ended"
TRIAL_STARTED, TRIAL_REPORTED, TRIAL_ENDED = "trial_started", "trial_reported", "trial_ended"
RUNNING, INTERRUPTED = "running", "interrupted"
DONE, PAUSED, STOPPED, INFEASIBLE, FAILED = "done", "paused", "stopped", "infeasible", "failed"

_VALUES = Mapping[str, Any]
_FIELDS: dict[str, dict[str, Any]] = {
    STARTED: {"objective": str, "direction": str, "search": str, "space": Mapping[str, _VALUES]},
    RESUMED: {"max_trials": int | None},
    TRIAL_STARTED: {"trial": str, "rung": int, "values": _VALUES, "epochs": int | None, "asked": int},
    TRIAL_REPORTED: {"trial": str, "epoch": int, "step": int, "objective": float, "asked": int},
    TRIAL_ENDED: {"trial": str, "rung": int, "status": str, "objective": float | None, "epochs": int, "seconds": float}
    | {"message": str, "values": _VALUES | None, "asked": int},
}


def check_event(path: str, event: Mapping[str, Any]) -> None:
    """Raises UserError where a line of the journal is not an event of a sweep, or a newer tfdist wrote it."""
    try:
        as_type(Any, event)
        kind = as_type(str, event.get("event"), "event")
        as_type(datetime.datetime, event.get("time"), "time")
        for name, kind_of_field in _FIELDS.get(kind, {}).items():
            as_type(kind_of_field, event.get(name), name)
    except NewerFormatError as error:
        raise NewerFormatError(f"{path} {error}") from error
    except (ValueError, OverflowError) as error:
        raise build_damage_error(path, str(error)) from error


@dataclasses.dataclass
class Journal:
    """The journal of the sweep in a run directory.

    Attributes:
      run_dir: of the sweep; it exists.
      on_event: called with a new event after it was written.
      still_ours: called before each event is written; raises when another chief has taken the directory.
    """

    run_dir: str
    on_event: Callable[[Mapping[str, Any]], None] = lambda event: None
    still_ours: Callable[[], None] = lambda: None
    _sink: LogSink | None = None

    def __post_init__(self) -> None:
        self._path = RunDirectory(self.run_dir).sweep

    def read(self) -> list[dict[str, Any]]:
        """All events so far; half a line at the end, of a machine that lost its power, does not count.

        Raises:
          UserError: the file is damaged, or a newer tfdist wrote it.
        """
        lines, _ = self._lines()
        started: set[Any] = set()
        events = []
        for number, line in enumerate(lines, 1):
            event = parse_line(line)
            if event is None or (number == 1 and event.get("event") != STARTED):
                raise build_damage_error(self._path, f"line {number} is {line[:60].decode(errors='replace')!r}")
            check_event(self._path, event)
            if event["event"] == TRIAL_STARTED:
                started.add(event["trial"])
            elif "trial" in _FIELDS.get(event["event"], {}) and event["trial"] not in started:
                raise build_damage_error(
                    self._path, f"line {number} is of trial {event['trial']}, which no line before starts"
                )
            events.append(event)
        return events

    def _lines(self) -> tuple[list[bytes], bytes]:
        """The lines, and what a crash left of one behind them."""
        try:
            *lines, torn = files.read(self._path).split(b"\n")
        except FileNotFoundError:
            return [], b""
        return (lines, torn) if parse_line(torn) is None else ([*lines, torn], b"")

    def write(self, event: str, **details: Any) -> None:
        """Appends an event, after it has cut off a torn line; raises where another chief has taken the directory."""
        self.still_ours()
        if self._sink is None:
            lines, torn = self._lines()
            if torn:
                files.write_atomic(self._path, b"".join(line + b"\n" for line in lines))
            self._sink = files.open_log(self._path)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"event": event, "time": now, **details}
        self._sink.write_line(to_json(entry))
        self.on_event(entry)

    def close(self) -> None:
        """Stores every event."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None


def check_identity(identity: Mapping[str, Any], started: Mapping[str, Any], run_dir: str) -> None:
    """Raises UserError where the journal's first event is of another sweep."""
    for name, own in from_json(to_json(identity)).items():
        theirs = started.get(name)
        if own != theirs and (own or theirs):  # older journals lack what is empty
            shown = "its settings differ" if name == "configuration" else f"there {theirs}, here {own}"
            raise build_user_error(
                f"{run_dir} holds another sweep; the {name}: {shown}. Give another --run_dir. "
                "(tune.max_trials, the other budgets and tune.num_workers may change.)",
                error_id="another-experiment",
            )


@dataclasses.dataclass(frozen=True)
class TrialPoint:
    """The objective that a trial reported after `epoch` epochs, at `step`."""

    epoch: int
    step: int
    objective: float


@dataclasses.dataclass(frozen=True)
class End:
    """How one stretch of a trial ended, when the sweep had run `at_seconds`; the objective counts if there is one."""

    objective: float | None
    seconds: float
    at_seconds: float


@dataclasses.dataclass(kw_only=True)
class Trial:
    """One trial with all its attempts: a paused or interrupted one is started again.

    `status` is that of the last attempt, "running" while it has not ended. `objective` is that of the last end that
    had one, None before. `epochs` are those trained in all, `target_epochs` those of the rung; `seconds` are the sum
    over the attempts. `host` is the node of the last one, None on the sweep's own machine. The curve's epochs never
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
    curve: list[TrialPoint] = dataclasses.field(default_factory=list)
    ends: list[End] = dataclasses.field(default_factory=list)

    @property
    def has_result(self) -> bool:
        """Whether the trial's objective may be compared: the trial ended well at least once."""
        return self.objective is not None and self.status not in (INFEASIBLE, FAILED)

    def add(self, event: Mapping[str, Any], at_seconds: float) -> None:
        """Takes in a start, an evaluation or an end, whose objective counts only if it is done, paused or stopped."""
        if event["event"] == TRIAL_STARTED:
            self.values, self.status, self.message = event["values"], RUNNING, ""
            self.rung, self.target_epochs = event["rung"], event.get("epochs")
        elif event["event"] == TRIAL_REPORTED:
            epoch, step = event["epoch"], event["step"]
            self.curve = [point for point in self.curve if (point.epoch, point.step) < (epoch, step)]
            if (objective := to_finite(event["objective"])) is not None:
                self.curve.append(TrialPoint(epoch, step, objective))
            self.epochs = max(self.epochs, epoch)
        else:
            self.status, self.message, seconds = event["status"], event["message"], event["seconds"]
            objective = to_finite(event["objective"]) if self.status in (DONE, PAUSED, STOPPED) else None
            self.host = event.get("host")
            self.ends.append(End(objective, seconds, at_seconds))
            self.values, self.rung = event.get("values", self.values), event["rung"]
            self.epochs, self.seconds = max(self.epochs, event["epochs"]), self.seconds + seconds
            self.objective = self.objective if objective is None else objective


@dataclasses.dataclass(kw_only=True)
class Sweep:
    """A whole sweep so far, which grows by the events of the journal in their order.

    Attributes:
      space: as `Space.describe` has it.
      started: when, as ISO 8601 has it.
      seconds: that it ran, to the last event of each start.
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
    last_time: datetime.datetime | None = None
    by_name: dict[str, Trial] = dataclasses.field(default_factory=dict)

    @property
    def trials(self) -> list[Trial]:
        """The trials in the order in which they first started."""
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
        kind, now = event["event"], as_type(datetime.datetime, event["time"])
        if kind not in (STARTED, RESUMED) and self.last_time is not None:
            self.seconds += max(0.0, (now - self.last_time).total_seconds())
        self.started, self.last_time, self.is_ended = self.started or event["time"], now, kind == ENDED
        if kind in (STARTED, RESUMED):
            self.max_trials = event.get("max_trials")
        if kind == STARTED:
            self.objective, self.direction, self.search = event["objective"], event["direction"], event["search"]
            self.space = event["space"]
        elif kind in (TRIAL_STARTED, TRIAL_REPORTED, TRIAL_ENDED):
            self.by_name.setdefault(event["trial"], Trial(name=event["trial"])).add(event, self.seconds)


def read_sweep(run_dir: str) -> Sweep:
    """The sweep of a run directory, local or `gs://`; raises UserError where there is none."""
    path = RunDirectory(run_dir).sweep
    if not files.exists(path):
        raise build_user_error(
            f"There is no sweep in {str(run_dir)!r}: {path} is missing. Name the run directory of --mode=tune.",
            error_id="missing-run",
        )
    sweep, unreadable = Sweep(), Unreadable()
    for event in read_lines(path, unreadable):
        try:
            check_event(path, event)
        except DamagedFileError:
            unreadable.lines += 1
        else:
            sweep.add(event)
    sweep.num_unreadable_lines = unreadable.lines
    return sweep


def to_finite(value: float | str | None) -> float | None:
    """Returns an objective as a number; None if there is none, and for NaN and infinities, which JSON has as text."""
    return None if value is None or not math.isfinite(float(value)) else float(value)
