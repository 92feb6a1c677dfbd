"""Reads the JSON files of a run directory, and decides what becomes of one that is damaged.

Invariant: a file is absent, damaged, of a newer format, or what its dataclass says; nothing else comes of its content.
`RUN_FILES` says what a damaged one means for the run. Of a log what a crash left of a last line, or what somebody else
wrote there, is passed over and counted, and never an error. Every reader of a run directory reads here.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.facts import Event, Point, Sample
from tfdist.telemetry.json_text import from_json
from tfdist.telemetry.run_directory import RUN_FILES, Policy, RunDirectory, RunFile

FORMAT = 1  # of every record; one without "format" has it
T = TypeVar("T")
Warn = Callable[[str], None]
POINT_KEYS = frozenset({"step", "epoch", "split", "learning_rate", "checkpoint"})  # of metrics.jsonl, beside metrics
_COPY = "Restore it from a copy of the run"


class DamagedFileError(UserError):
    """A file is not what its writer leaves there."""

    error_id = "damaged-file"


class NewerFormatError(UserError):
    """A file was written by a newer tfdist."""


_BY_NAME = {file.name.rstrip("/").rpartition("/")[2]: file for file in RUN_FILES}


def load_record(path: str, kind: type[T]) -> T | None:
    """Reads a JSON file as a dataclass; None where there is no such file.

    Raises:
      DamagedFileError: it holds something else.
      NewerFormatError: a newer tfdist wrote it.
    """
    try:
        record: T = as_type(kind, from_json(files.read(path)))
        return record
    except FileNotFoundError:
        return None
    except NewerFormatError as error:
        raise NewerFormatError(f"{path} {error}") from error
    except (ValueError, OverflowError) as error:
        raise build_damage_error(path, str(error)) from error


def load_if_whole(path: str, kind: type[T]) -> T | None:
    """`load_record` for who only looks: None for a damaged file, too."""
    try:
        return load_record(path, kind)
    except DamagedFileError:
        return None


def build_damage_error(path: str, why: str) -> DamagedFileError:
    """The error for a file that is not what its writer leaves."""
    file = _file_of(path)
    return DamagedFileError(f"{path} is damaged: {why}. It holds {file.content}. {file.advice}")


_LINE_COUNT = re.compile(rb"# This file has (\d+) lines\.")


def with_line_count(text: str) -> str:
    """Adds a first line that says how many lines there are, by which `check_line_count` notices a file cut short."""
    num_lines = 1 + text.count("\n")
    return f"# This file has {num_lines} lines.\n{text}"


def check_line_count(path: str, content: bytes) -> None:
    """Raises DamagedFileError where lines are missing; a file that does not say how many it has passes."""
    stated, lines = _LINE_COUNT.match(content), content.count(b"\n")
    if stated is not None and lines < int(stated[1]):
        raise build_damage_error(path, f"{lines} of its {stated[1].decode()} lines are there")


def read_record(path: str, kind: type[T], warn: Warn) -> T | None:
    """`load_record` for who goes on to write: a damaged file is None too, where its policy has the run go on.

    Raises:
      DamagedFileError: its policy is REFUSE.
      NewerFormatError: a newer tfdist wrote it.
    """
    try:
        return load_record(path, kind)
    except DamagedFileError as error:
        file = _file_of(path)
        if file.policy is Policy.REFUSE:
            raise
        why = f"{path} is damaged: {error.__cause__}."
        if file.policy is Policy.KEEP:
            why += f" It is kept as {keep_damaged(path)}."
        warn(f"{why} {file.advice}")
        return None


def keep_damaged(path: str) -> str:
    """Copies a file to NAME.damaged; returns the copy's path."""
    files.write_atomic(f"{path}.damaged", files.read(path))
    return f"{path}.damaged"


def remove_stale(run_dir: str, mode: str) -> None:
    """Removes what writers that were killed left half written of a mode's files; for the holder of its lease."""
    for file in RUN_FILES:
        if file.mode == mode:
            files.remove_stale(files.join(run_dir, file.name))


@dataclasses.dataclass
class Unreadable:
    """The number of whole lines of logs that could not be parsed."""

    lines: int = 0


def read_lines(path: str, unreadable: Unreadable) -> Iterator[dict[str, Any]]:
    """The JSON object of each line of a log; what a crash left of a last line is passed over."""
    try:
        lines = files.read(path).split(b"\n")
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, start=1):
        content = parse_line(line)
        if content is not None:
            yield content
        elif number < len(lines):
            unreadable.lines += 1


def parse_line(line: bytes | str) -> dict[str, Any] | None:
    """The JSON object of a line; None where it is none."""
    try:
        content = from_json(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def as_type(kind: Any, value: Any, path: str = "it") -> Any:
    """A value of JSON as a dataclass, a collection or a plain value of the type `kind`; what a dataclass lacks is left
    out.

    Raises:
      ValueError: it is of another type, or lacks a field that has no default.
      NewerFormatError: an object for a dataclass has a "format" above FORMAT.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, dict) and (dataclasses.is_dataclass(kind) or path == "it"):
        _check_format(value)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return as_type(next(each for each in arguments if each is not type(None)), value, path)
    if origin is typing.Literal and value in arguments:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _as_dataclass(kind, value, path)
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        return [as_type(arguments[0], each, f"{path}[{index}]") for index, each in enumerate(value)]
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {name: as_type(arguments[1], each, f"{path}.{name}") for name, each in value.items()}
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value)  # "nan" and "inf" are written as text
    if kind is datetime.datetime and isinstance(value, str):
        time = datetime.datetime.fromisoformat(value)
        return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{path} is {repr(value)[:60]}")


def _check_format(value: Mapping[str, Any]) -> None:
    version = value.get("format", FORMAT)
    if isinstance(version, int) and version > FORMAT:
        raise NewerFormatError(
            f"is of format {version}; this tfdist reads format {FORMAT}. Use the tfdist that wrote it, or give another "
            "--run_dir."
        )


def _as_dataclass(kind: Any, value: Mapping[str, Any], path: str) -> Any:
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            inner = field.name if path == "it" else f"{path}.{field.name}"
            values[field.name] = as_type(_hints(kind)[field.name], value[field.name], inner)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{path} has no {field.name!r}")
    return kind(**values)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _file_of(path: str) -> RunFile:
    *folders, name = path.split("/")
    known = [_BY_NAME[each] for each in folders if each in _BY_NAME and _BY_NAME[each].name.endswith("/")]
    other = RunFile(name, "what a run left there", Policy.REFUSE, f"{_COPY}.")
    return _BY_NAME.get(name) or [other, *known][-1]


def read_events(run: RunDirectory, unreadable: Unreadable) -> list[Event]:
    """The events of all workers, by time."""
    return sorted(_build_record(_event, run.all_events(), unreadable), key=lambda event: event.time)


def read_samples(run: RunDirectory, unreadable: Unreadable) -> list[Sample]:
    """The samples of all workers, each worker's in the order of its processes, whatever the clock did meanwhile."""
    return list(_build_record(_sample, run.all_samples(), unreadable))


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


def _build_record(make: Callable[[dict[str, Any]], T], paths: list[str], unreadable: Unreadable) -> Iterator[T]:
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
    return dataclasses.replace(sample, seconds=_select_finite(sample.seconds), values=_select_finite(sample.values))


def _select_finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
