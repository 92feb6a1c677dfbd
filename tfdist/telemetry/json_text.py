"""Turns what a run reports into JSON that every parser takes, and reads JSON that somebody else wrote.

Invariant: the text is JSON as RFC 8259 has it. NaN and the infinities, for which JSON has no number, become the
strings "nan", "inf" and "-inf", which `float()` reads back. The event log, the metrics log and the result use it;
messages from outside of this process are read with `from_json`, and files of a run directory by `records.py`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np


def to_json(value: object, *, indent: int | None = None) -> str:
    """One line of JSON, or several with `indent`; what JSON does not know is written as its `str`."""
    return json.dumps(_to_plain(value), indent=indent, allow_nan=False)


def from_json(data: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError for everything that is none, however deeply it is nested."""
    try:
        return json.loads(data, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _to_plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, datetime.datetime):
        return value.isoformat(timespec="milliseconds")
    if hasattr(value, "__array__"):
        return _to_plain(np.asarray(value).tolist())
    return str(value)
