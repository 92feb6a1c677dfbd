"""Checks what the roots were given, by kind, before anything is connected, made or written.

Invariant: whatever passes here can be used as the root's docstring says. Raises UserError with the setting's name, the
value and what to write.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfdist.errors import UserError, is_whole_number, suggest
from tfdist.strategies.base import Strategy
from tfdist.tasks.base import Task

MOST_SEED = 2**32 - 1  # NumPy's


def check_counts(root: str, counts: Mapping[str, Any], *, needed: Collection[str] = ()) -> None:
    """Each is a whole number above 0, or None if it is not `needed`."""
    for name, value in counts.items():
        if not is_whole_number(value) and (value is not None or name in needed):
            raise UserError(f"{root}.{name} is {value!r}; write a whole number of at least 1.")


def check_switches(root: str, switches: Mapping[str, Any]) -> None:
    """Each is True or False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UserError(f"{root}.{name} is {value!r}; write True or False.")


def check_epochs(root: str, *, initial_epoch: Any, eval_every_epochs: Any) -> None:
    """The first is a whole number from 0 on, the second one from 1 on or a list of such."""
    if not is_whole_number(initial_epoch, least=0):
        raise UserError(f"{root}.initial_epoch is {initial_epoch!r}; write a whole number of at least 0.")
    listed = eval_every_epochs if isinstance(eval_every_epochs, list | tuple | set) else [eval_every_epochs]
    if not all(map(is_whole_number, listed)):
        raise UserError(
            f"{root}.eval_every_epochs is {eval_every_epochs!r}; write a whole number of at least 1, or a list of the "
            "numbers of epochs."
        )


def check_choice(setting: str, value: Any, choices: Collection[str]) -> None:
    """It is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        near = suggest(value, choices) if isinstance(value, str) else ""
        raise UserError(f"{setting} is {value!r}; write one of {', '.join(map(repr, choices))}.{near}")


def check_text(setting: str, value: Any, example: str) -> None:
    """It is a text that is not empty, or None."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise UserError(f"{setting} is {value!r}; write a text, such as {example!r}.")


def check_seed(setting: str, seed: Any) -> None:
    """It is a whole number that every generator of random numbers takes."""
    if not is_whole_number(seed, least=0) or seed > MOST_SEED:
        raise UserError(f"{setting} is {seed!r}; write a whole number from 0 to {MOST_SEED}.")


def check_objects(root: str, *, strategy: Any, task: Any) -> None:
    """They are what their names say, made already; the task may be None."""
    for name, value, kind, example in (
        ("strategy", strategy, Strategy, "@mirrored.Mirrored()"),
        ("task", task, Task, "@supervised.Supervised()"),
    ):
        if not isinstance(value, kind) and not (name == "task" and value is None):
            raise UserError(f"{root}.{name} is {_kind_of(value)}; write {example}, with parentheses.")


def check_functions(root: str, functions: Mapping[str, Callable[..., Any] | None], *, optional: str = "") -> None:
    """Each can be called without arguments, or is the `optional` one and None."""
    for name, value in functions.items():
        if not (value is None and name == optional) and not _can_be_called(value):
            raise UserError(
                f"{root}.{name} is {_kind_of(value)}; write a function, @my_module.my_function without parentheses: it "
                "is called, without arguments, when the run needs it."
            )


def _can_be_called(value: Any) -> bool:
    """Functions and classes are taken as they are, since gin may give them what they need; a callable object is not."""
    if callable(value) and not isinstance(value, type) and not inspect.isroutine(value):
        try:
            inspect.signature(value).bind()
        except TypeError:
            return False
    return callable(value)


def _kind_of(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value):
        return f"the function {getattr(value, '__name__', value)}"
    return repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
