"""Reads the JSON files of a run directory, and decides what becomes of one that is damaged.

Invariant: a file is absent, damaged, of a newer format, or what its dataclass says; nothing else comes of its content.
`RUN_FILES` says what a damaged one means for the run. Every reader of a run directory reads here.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.json_text import from_json

FORMAT = 1  # of every record; one without "format" has it
T = TypeVar("T")
Warn = Callable[[str], None]


class DamagedFileError(UserError):
    """A file is not what its writer leaves there."""

    error_id = "damaged-file"


class NewerFormatError(UserError):
    """A file was written by a newer tfdist."""


class Policy(enum.Enum):
    """What becomes of a damaged file."""

    REMAKE = "made again, with a warning"
    KEEP = "kept as `NAME.damaged`, with a warning"
    REFUSE = "refused with status 2; nothing is removed"


@dataclasses.dataclass(frozen=True)
class RunFile:
    """A file of a run directory, or a directory of files, whose name ends with a slash.

    Attributes:
      content: what it holds.
      advice: what is lost with it, or what to do.
      mode: whose lease covers it.
    """

    name: str
    content: str
    policy: Policy
    advice: str
    mode: str = "train"


_COPY = "Restore it from a copy of the run"
RUN_FILES = (
    RunFile(
        "checkpoints/",
        "the state of the training",
        Policy.REFUSE,
        "A damaged checkpoint is passed over for an older one, with a warning. Where none is whole: restore one, or "
        "move checkpoints/ away to begin again.",
    ),
    RunFile(
        "rollbacks.json",
        "the steps that failed, and what the run does differently since",
        Policy.REFUSE,
        f"{_COPY}, or remove it: then the run trains as if no step had failed.",
    ),
    RunFile(
        "fitted/",
        "what was fitted to the training data",
        Policy.REFUSE,
        f"{_COPY}, or remove it: then it is fitted to the present data.",
    ),
    RunFile(
        "hyperparameters.json",
        "what build(hp) was called with",
        Policy.REFUSE,
        f"{_COPY}, or remove it and train again.",
    ),
    RunFile(
        "config.gin", "the experiment", Policy.REFUSE, "A training does not read it. For other modes give --gin_file."
    ),
    RunFile(
        "result.json",
        "how the run ended",
        Policy.REFUSE,
        "Remove it to continue with the run in this directory, or give another --run_dir.",
    ),
    RunFile("export/model.keras", "the trained model", Policy.REFUSE, "Use weights = 'last'."),
    RunFile("export/adapter.npz", "the adapter of the trained model", Policy.REFUSE, "Use model.keras."),
    RunFile(
        "sweep.jsonl",
        "what happened in the sweep",
        Policy.REFUSE,
        f"{_COPY}, or give another --run_dir. Half a last line is removed.",
        mode="tune",
    ),
    RunFile("best.gin", "the best trial's experiment", Policy.REMAKE, "Nothing is lost.", mode="tune"),
    RunFile("trials.csv", "the trials as a table", Policy.REMAKE, "Nothing is lost.", mode="tune"),
    RunFile(
        "run.json", "the starts of the run", Policy.KEEP, "Goodput and the rate of failures count from this start on."
    ),
    RunFile("metrics.jsonl", "the logged points", Policy.KEEP, "Lines that can be read stay."),
    RunFile(
        "events*.jsonl",
        "the events, a file for each worker and mode",
        Policy.KEEP,
        "Readers skip lines that cannot be read; nothing is removed.",
    ),
    RunFile(
        "telemetry/",
        "what each process used, and the run's ID",
        Policy.KEEP,
        "As events. Without run_id, trackers see another run.",
    ),
    RunFile("tuned.json", "what 'auto' came to", Policy.REMAKE, "The run chooses again."),
    RunFile("xla_cache/", "what XLA has compiled", Policy.REMAKE, "XLA compiles again."),
    RunFile("fast_check/", "a check in progress", Policy.REMAKE, "Emptied before each check.", mode="fast_check"),
    RunFile("find_rate/", "a range test in progress", Policy.REMAKE, "Emptied before each test.", mode="find_rate"),
    RunFile("find_rate.json", "the last range test", Policy.REMAKE, "Repeat the test.", mode="find_rate"),
    RunFile("evaluation.json", "the last evaluation", Policy.REMAKE, "Evaluate again.", mode="evaluate"),
    RunFile(
        "predictions/",
        "the last predictions",
        Policy.REMAKE,
        "Parts that are not as they were written are predicted again.",
        mode="predict",
    ),
    RunFile("export/saved_model/", "the model for servers", Policy.REMAKE, "Export again.", mode="export"),
    RunFile("export/model.tflite", "the model for LiteRT", Policy.REMAKE, "Export again.", mode="export"),
    RunFile("export/model.onnx", "the model for ONNX", Policy.REMAKE, "Export again.", mode="export"),
    RunFile("export/report.json", "how far exports are from the model", Policy.REMAKE, "Export again.", mode="export"),
    RunFile("plan.json", "the last plan", Policy.REMAKE, "Plan again.", mode="plan"),
    RunFile("plan.gin", "the same as settings", Policy.REMAKE, "Plan again.", mode="plan"),
)
_BY_NAME = {file.name.rstrip("/").rpartition("/")[2]: file for file in RUN_FILES}


def load_record(path: str, kind: type[T]) -> T | None:
    """What a JSON file holds, as a dataclass; None where there is no such file.

    Raises:
      DamagedFileError: it holds something else.
      NewerFormatError: a newer tfdist wrote it.
    """
    try:
        content = files.read(path)
    except FileNotFoundError:
        return None
    return parse_record(path, content, kind)


def parse_record(path: str, content: bytes, kind: Any) -> Any:
    """As `load_record`, of content that was read already."""
    try:
        return as_type(kind, from_json(content))
    except NewerFormatError as error:
        raise NewerFormatError(f"{path} {error}") from error
    except (ValueError, OverflowError) as error:
        raise build_damage_error(path, str(error)) from error


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
    """How many whole lines of logs said nothing that could be understood."""

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


def as_type(kind: Any, value: Any, place: str = "it") -> Any:
    """A value of JSON as a dataclass, a collection or a plain value of the type `kind`; what a dataclass lacks is left
    out.

    Raises:
      ValueError: it is of another type, or lacks a field that has no default.
      NewerFormatError: an object for a dataclass has a "format" above FORMAT.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, dict) and (dataclasses.is_dataclass(kind) or place == "it"):
        _check_format(value)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return as_type(next(each for each in arguments if each is not type(None)), value, place)
    if origin is typing.Literal and value in arguments:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _as_dataclass(kind, value, place)
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        return [as_type(arguments[0], each, f"{place}[{index}]") for index, each in enumerate(value)]
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {name: as_type(arguments[1], each, f"{place}.{name}") for name, each in value.items()}
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value)  # "nan" and "inf" are written as text
    if kind is datetime.datetime and isinstance(value, str):
        time = datetime.datetime.fromisoformat(value)
        return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{place} is {repr(value)[:60]}")


def _check_format(value: Mapping[str, Any]) -> None:
    version = value.get("format", FORMAT)
    if isinstance(version, int) and version > FORMAT:
        raise NewerFormatError(
            f"is of format {version}; this tfdist reads format {FORMAT}. Use the tfdist that wrote it, or give another "
            "--run_dir."
        )


def _as_dataclass(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            inner = field.name if place == "it" else f"{place}.{field.name}"
            values[field.name] = as_type(_hints(kind)[field.name], value[field.name], inner)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{place} has no {field.name!r}")
    return kind(**values)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _file_of(path: str) -> RunFile:
    *folders, name = path.split("/")
    known = [_BY_NAME[each] for each in folders if each in _BY_NAME and _BY_NAME[each].name.endswith("/")]
    other = RunFile(name, "what a run left there", Policy.REFUSE, f"{_COPY}.")
    return _BY_NAME.get(name) or [other, *known][-1]
