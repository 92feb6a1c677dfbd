"""A run as its directory shows it, at any moment of it: what a report is made of.

Invariant: only reads; whatever is missing or half written is left out. `read_run` alone knows the files.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tfdist.errors import UserError
from tfdist.report.curves import Curve, read_curves
from tfdist.storage import files
from tfdist.telemetry.account.goodput import Account, Interval, intervals, total
from tfdist.telemetry.facts import Event, Sample
from tfdist.telemetry.logs.records import read_events, read_samples
from tfdist.telemetry.records import DamagedFileError, Unreadable, load_record
from tfdist.telemetry.result import RunResult, Start, Starts
from tfdist.telemetry.run_directory import RunDirectory

DONE, RUNNING, UNFINISHED = "done", "running", "unfinished"
# The status that an event gives to a run, until it is started again.
ENDS = {"run_failed": "failed", "preempted": "preempted", "left_unsaved": "left unsaved", "run_paused": "paused"}
# Samples are stored every ten seconds, half a minute later on gs://, and of a long run every 360th of its time.
SILENCE_SECONDS, SILENCE_SHARE = 90.0, 1 / 200
BEGIN, FINISHED = "run_started", "run_finished"  # an evaluation may come later
T = TypeVar("T")
_STATEMENT = re.compile(r"(\S+) = ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What the files of a run hold.

    Attributes:
      path: the run directory, local or gs://.
      given: the settings that were stated, by the names of config.gin, as text.
      defaults: those that the run has used and nobody stated; known at its end.
      result: result.json, unless it is damaged or the run was started again since; else None.
      starts: of run.json.
      curves: by metric and split.
      events, samples: by time.
      unreadable: lines that nobody can read.
    """

    path: str
    config: str
    given: Mapping[str, str]
    defaults: Mapping[str, str]
    result: RunResult | None
    starts: Sequence[Start]
    curves: Mapping[tuple[str, str], Curve]
    events: Sequence[Event]
    samples: Sequence[Sample]
    unreadable: int

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2] or self.path

    @property
    def settings(self) -> dict[str, str]:
        return {**self.defaults, **self.given}

    def status(self, now: datetime.datetime) -> str:
        """DONE, one of ENDS, RUNNING where something was heard lately; else UNFINISHED."""
        if self.result is not None:
            return self.result.status
        for event in reversed(self.events):
            if event.name in ENDS:
                return ENDS[event.name]
            if event.name == BEGIN:
                break
        last, seconds = self.last_word, self.wall_seconds
        if last is None or seconds is None:
            return UNFINISHED
        return RUNNING if (now - last).total_seconds() < SILENCE_SECONDS + seconds * SILENCE_SHARE else UNFINISHED

    def is_over(self, now: datetime.datetime) -> bool:
        """Whether the run has said that it ended."""
        return self.status(now) not in (RUNNING, UNFINISHED)

    @property
    def last_word(self) -> datetime.datetime | None:
        """When the run was last heard of."""
        return max([*(e.time for e in self.events[-1:]), *(s.time for s in self.samples[-1:])], default=None)

    @property
    def began(self) -> datetime.datetime | None:
        """When the run was first heard of."""
        return min([*(e.time for e in self.events[:1]), *(s.time for s in self.samples[:1])], default=None)

    @property
    def wall_seconds(self) -> float | None:
        """From its beginning to its end, or else its last word, the time between its starts included."""
        finished = [event.time for event in self.events if event.name == FINISHED and self.result]
        began, last = self.began, finished[-1] if finished else self.last_word
        return None if began is None or last is None else (last - began).total_seconds()

    @property
    def steps(self) -> int:
        """That were done, as far as anything tells."""
        known = [curve.steps[-1] for curve in self.curves.values()]
        known += [event.step for event in self.events if event.step is not None]
        return max(known, default=0) if self.result is None else self.result.steps

    def fact(self, name: str) -> Any:
        """What result.json holds of a name, else what the last start told; None where neither does."""
        if (found := getattr(self.result, name, None)) is not None:
            return found
        told = (event.details[name] for event in reversed(self.events) if event.name == BEGIN and name in event.details)
        return next(told, None)

    @property
    def metrics(self) -> dict[str, float]:
        """The final metrics, evaluations' under "val_…"; of half a run the newest."""
        newest = {
            f"{prefix}{metric}": curve.last
            for kind, prefix in (("train", ""), ("eval", "val_"))
            for (metric, split), curve in self.curves.items()
            if split == kind and is_metric(metric)
        }
        if self.result:
            newest |= _numbers(self.result.train_metrics, "") | _numbers(self.result.eval_metrics, "val_")
        return newest

    @functools.cached_property
    def intervals(self) -> dict[int, list[Interval]]:
        """What each worker did, sample by sample."""
        return intervals(self.samples, self.starts)

    @functools.cached_property
    def accounts(self) -> dict[int, Account]:
        """Where each worker's wall clock went."""
        return {worker: total(own) for worker, own in self.intervals.items()}

    @property
    def goodput(self) -> float | None:
        """None where nothing was sampled."""
        return total(self.accounts.values()).goodput


def is_metric(name: str) -> bool:
    """Whether a curve is about what is learned, and not about how."""
    return name not in ("learning_rate", "gradient_norm")


def read_run(run_dir: str) -> Run:
    """Reads a run directory, local or gs://.

    Raises:
      UserError: no run has written there.
    """
    place = RunDirectory(run_dir)
    if not any(files.exists(path) for path in (place.starts, place.events, place.metrics)):
        raise UserError(
            f"{run_dir!r} holds no run: there is no run.json, events.jsonl or metrics.jsonl. Write the --run_dir of a "
            f"training, or --list {run_dir} for the runs below a directory."
        )
    unreadable = Unreadable()
    config = _text(place.config)
    given, defaults = _settings(config)
    starts = record.starts if (record := _whole(place.starts, Starts)) is not None else ()
    result = _whole(place.result, RunResult)
    return Run(
        path=place.path,
        config=config,
        given=given,
        defaults=defaults,
        result=result if result is not None and len(result.starts or starts) >= len(starts) else None,
        starts=starts,
        curves=read_curves(place.metrics, unreadable),
        events=read_events(place, unreadable),
        samples=read_samples(place, unreadable),
        unreadable=unreadable.lines,
    )


def versions(run_dir: str) -> list[tuple[str, int, int]]:
    """The files that `read_run` reads, with what changes when their content does."""
    place = RunDirectory(run_dir)
    paths = [place.config, place.result, place.starts, place.metrics, *place.all_events(), *place.all_samples()]
    found = [files.stat(path) for path in paths if files.exists(path)]
    return [(each.path, each.num_bytes, each.changed_nanoseconds) for each in found]


def _settings(config: str) -> tuple[dict[str, str], dict[str, str]]:
    """What config.gin states, and the defaults that it lists; a value may go on in indented lines."""
    given: dict[str, str] = {}
    defaults: dict[str, str] = {}
    into, name = given, ""
    for line in config.splitlines():
        statement = _STATEMENT.match(line)
        if line.startswith("# "):
            into = defaults if line.endswith(": defaults that the run has used") else given
        elif statement is not None:
            name = statement[1]
            into[name] = line[statement.end() :]
        elif name and line.startswith(" "):
            into[name] += " " + line.strip()
    return given, defaults


def _numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {f"{prefix}{name}": float(value) for name, value in values.items() if isinstance(value, int | float)}


def _text(path: str) -> str:
    try:
        return files.read(path).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _whole(path: str, kind: type[T]) -> T | None:
    """What a file holds; None where it is missing or damaged."""
    try:
        return load_record(path, kind)
    except DamagedFileError:
        return None
