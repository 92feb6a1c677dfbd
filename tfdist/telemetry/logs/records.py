"""Reads back what a run has told: its events and samples, and the lines of any of its logs.

Invariant: what a crash left of a last line, or what somebody else wrote there, is passed over and counted, and never an
error; a file that is not there holds nothing. The report reads a run with it, and a start what those before it used.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tfdist.storage import files
from tfdist.telemetry.facts import Event, Sample
from tfdist.telemetry.json_text import from_json
from tfdist.telemetry.run_directory import RunDirectory

Made = TypeVar("Made")


@dataclasses.dataclass
class Unreadable:
    """How many whole lines said nothing that could be understood."""

    lines: int = 0


def read_lines(path: str, unreadable: Unreadable) -> Iterator[dict[str, Any]]:
    """The JSON object of each line of a log."""
    try:
        lines = files.read(path).decode(errors="replace").split("\n")
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, start=1):
        try:
            content = from_json(line)
        except ValueError:
            content = None
        if isinstance(content, dict):
            yield content
        elif number < len(lines):
            unreadable.lines += 1


def read_events(run: RunDirectory, unreadable: Unreadable) -> list[Event]:
    """The events of all workers, by time."""
    return sorted(_made(_event, run.all_events(), unreadable), key=lambda event: event.time)


def read_samples(run: RunDirectory, unreadable: Unreadable) -> list[Sample]:
    """The samples of all workers, by time."""
    return sorted(_made(_sample, run.all_samples(), unreadable), key=lambda sample: sample.time)


def _made(make: Callable[[dict[str, Any]], Made], paths: list[str], unreadable: Unreadable) -> Iterator[Made]:
    for path in paths:
        for line in read_lines(path, unreadable):
            try:
                yield make(line)
            except (KeyError, TypeError, ValueError, AttributeError):
                unreadable.lines += 1


def _event(line: dict[str, Any]) -> Event:
    details = dict(line.get("details") or {})
    return Event(
        name=str(line["event"]),
        level=line["level"],
        worker=line.get("worker"),
        step=line.get("step"),
        message=details.pop("message", None),
        details=details,
        time=_time(line["time"]),
    )


def _sample(line: dict[str, Any]) -> Sample:
    return Sample(
        worker=int(line["worker"]),
        start=int(line["start"]),
        step=None if line.get("step") is None else int(line["step"]),
        seconds=_numbers(line["seconds"]),
        values=_numbers(line.get("values") or {}),
        time=_time(line["time"]),
    )


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if math.isfinite(float(value))}


def _time(text: str) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
