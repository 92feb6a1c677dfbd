"""What the value of a setting has to be, and what to write in place of one that it cannot be.

Invariant: a value that passes can be used as the setting's meaning says.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

from tfdist.errors import build_user_error, is_whole_number, suggest

MOST_SEED = 2**32 - 1  # NumPy's
MOST_COUNT = 10**12
_LITERALS = (str, int, float, list, tuple, dict, set, type(None))
_MOST_SHOWN = 100  # characters of a value


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of a setting's value.

    Attributes:
      wanted: what to write, "a whole number of at least 1".
      accepts: tells it of any value but None.
      takes_none: whether None will do.
      hint: a sentence about a value that will not, such as a near name.
    """

    wanted: str
    accepts: Callable[[Any], bool]
    takes_none: bool = False
    hint: Callable[[Any], str] = lambda value: ""

    def __call__(self, name: str, value: Any) -> None:
        """Checks a setting's value; raises UserError, with the setting's name, where it is refused."""
        if not (self.takes_none if value is None else self.accepts(value)):
            raise build_user_error(
                f"{name} is {format_value(value)}; write {self.described}.{self.hint(value)}", error_id="wrong-value"
            )

    @property
    def described(self) -> str:
        """The expected value in words, None included."""
        return self.wanted + (", or None" if self.takes_none else "")


def or_none(check: Check) -> Check:
    """Returns a check that accepts None, too."""
    return dataclasses.replace(check, takes_none=True)


def whole_number(least: int = 1, most: int | None = None) -> Check:
    """Returns a check that accepts an int from `least` to `most`, by default one whose products fit into 64 bits."""
    limit = MOST_COUNT if most is None else most
    return Check(
        f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}",
        lambda value: is_whole_number(value, least=least) and value <= limit,
        hint=lambda value: (
            f" The most is {limit:,}." if most is None and is_whole_number(value) and value > limit else ""
        ),
    )


def number(least: float, most: float = math.inf) -> Check:
    """Returns a check that accepts a number from `least` to `most`."""
    return Check(
        f"a number from {least:g}" + (f" to {most:g}" if most < math.inf else ""),
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most,
    )


def one_of(*choices: str) -> Check:
    """Returns a check that accepts some words."""
    return Check(
        f"one of {', '.join(map(repr, choices))}",
        lambda value: isinstance(value, str) and value in choices,
        hint=lambda value: suggest(value, choices) if isinstance(value, str) else "",
    )


def text(example: str) -> Check:
    """Returns a check that accepts a text that is not empty."""
    return Check(f"a text, such as {example!r}", is_text)


def is_text(value: Any) -> bool:
    """Returns whether a value is a text that is not empty."""
    return isinstance(value, str) and bool(value.strip())


def checked_later(example: str) -> Check:
    """Returns a check that accepts any value; the part that uses the value checks it."""
    return Check(example, lambda value: True, takes_none=True)


def instance_of(kind: type | tuple[type, ...], example: str) -> Check:
    """Returns a check that accepts an instance of a class, which gin makes."""
    return Check(f"{example}, with parentheses", lambda value: isinstance(value, kind))


def _is_above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_callable(value: Any) -> bool:
    """Returns whether a value is a function, a class, or an object that can be called without arguments."""
    if callable(value) and not isinstance(value, type) and not inspect.isroutine(value):
        try:
            inspect.signature(value).bind()
        except TypeError:
            return False
    return callable(value)


COUNT = whole_number(1)
SEED = whole_number(0, MOST_SEED)
SWITCH = Check("True or False", lambda value: isinstance(value, bool))
POSITIVE = Check("a number above 0", _is_above_zero)
DIFFERENT_NAMES = Check(
    "a list of different names, such as ['cats', 'dogs']",
    lambda value: isinstance(value, list | tuple) and bool(value) and len(set(value)) == len(value),
)
SECONDS = Check("a number of seconds above 0", _is_above_zero)
FUNCTION = Check(
    "a function, @my_module.my_function without parentheses",
    _is_callable,
    hint=lambda value: " It is called, without arguments, when the run needs it.",
)


def format_value(value: Any) -> str:
    """A value as a message names it."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', value)}"
    text = repr(value) if isinstance(value, _LITERALS) else ""
    return text if 0 < len(text) <= _MOST_SHOWN else f"a {type(value).__name__}"
