"""Reads back what a run has told: its events, points and samples.

Invariant: what a crash left of a last line, or what somebody else wrote there, is passed over and counted, and never an
error; a file that is not there holds nothing. The report reads a run with it, and a start what those before it used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from tfdist.telemetry.facts import Event, Point, Sample
from tfdist.telemetry.records import NewerFormatError, Unreadable, as_type, read_lines
from tfdist.telemetry.run_directory import RunDirectory

Made = TypeVar("Made")
POINT_KEYS = frozenset({"step", "epoch", "split", "learning_rate"})  # of metrics.jsonl, beside metrics


def read_events(run: RunDirectory, unreadable: Unreadable) -> list[Event]:
    """The events of all workers, by time."""
    return sorted(_build_record(_event, run.all_events(), unreadable), key=lambda event: event.time)


def read_samples(run: RunDirectory, unreadable: Unreadable) -> list[Sample]:
    """The samples of all workers, by time."""
    return sorted(_build_record(_sample, run.all_samples(), unreadable), key=lambda sample: sample.time)


def as_point(line: Mapping[str, Any] | None) -> Point | None:
    """The point that a line of metrics.jsonl holds; None for anything else."""
    if line is None:
        return None
    own = {name: line[name] for name in POINT_KEYS if name in line}
    metrics = {name: value for name, value in line.items() if name not in POINT_KEYS}
    try:
        return as_type(Point, own | {"metrics": metrics}, "the line")
    except (ValueError, OverflowError):
        return None


def _build_record(make: Callable[[dict[str, Any]], Made], paths: list[str], unreadable: Unreadable) -> Iterator[Made]:
    for path in paths:
        for line in read_lines(path, unreadable):
            try:
                yield make(line)
            except (ValueError, OverflowError, NewerFormatError):
                unreadable.lines += 1


def _event(line: dict[str, Any]) -> Event:
    details = as_type(dict[str, Any], line.get("details") or {})
    message = details.pop("message", None)
    fields = {"name": line.get("event"), "time": line.get("time"), "message": message, "details": details}
    return as_type(Event, line | fields)


def _sample(line: dict[str, Any]) -> Sample:
    fields = {"step": line.get("step"), "time": line.get("time"), "values": line.get("values") or {}}
    sample = as_type(Sample, line | fields)
    if sample.start < 0:
        raise ValueError(f"its start is {sample.start}")
    return dataclasses.replace(sample, seconds=_finite(sample.seconds), values=_finite(sample.values))


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
