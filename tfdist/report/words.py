"""Names, values and durations in few signs.

Invariant: one line each, without control characters, whatever a user's choice holds. Table, plots and page share these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_GIN_REFERENCE = re.compile(r"[@%][\w./]+(\(\))?")


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """For each path the shortest end of it that no other of them shares."""

    def end(path: str, count: int) -> str:
        return ".".join(path.split(".")[-count:])

    names = {}
    for path in paths:
        counts = range(1, path.count(".") + 2)
        alone = (count for count in counts if sum(end(other, count) == end(path, count) for other in paths) == 1)
        names[path] = end(path, next(alone, path.count(".") + 1))
    return names


def value_text(value: Any, *, most: int | None = None) -> str:
    """A parameter's value: floats to three digits, text without quotes, the rest as Python has it; cut to `most`.

    Of a reference such as `@keras.optimizers.Adam()` the last component is left: `@Adam()`.
    """
    if isinstance(value, float):
        return f"{value:.3g}"
    text = value if isinstance(value, str) else repr(value)
    if _GIN_REFERENCE.fullmatch(text):
        text = text[0] + re.split(r"[./]", text[1:])[-1]
    return shorten("".join(sign if sign.isprintable() else " " for sign in text), most)


def values_text(values: Mapping[str, Any]) -> str:
    """`learning_rate 0.001  layers 3`."""
    names = short_names(list(values))
    return "  ".join(f"{names[path]} {value_text(value, most=24)}" for path, value in values.items())


def shorten(text: str, most: int | None) -> str:
    """The text in at most `most` signs, with `…` in the place of its middle: the ends tell things apart."""
    if most is None or len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def count_text(count: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration_text(seconds: float) -> str:
    """`0:12:05`: hours, minutes, seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
