"""Reads examples of an object by their number and stacks them to a batch of NumPy arrays.

Invariant: it imports no TensorFlow, so that a process that only reads starts quickly.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.data.sources.columns import Columns
from tfdist.errors import EXIT_BUG, TfdistError, UserError
from tfdist.user_code import build_error

_process_data: Any = None  # in a process that only reads: its copy of the data


def read_batch(
    data: Any, numbers: Sequence[int], description: str | None = None, columns: Columns | None = None
) -> Any:
    """The batch of these examples: a nest of arrays with one row an example.

    Args:
      description: as `describe_nest` gives it of example 0; None where that is being read.
      columns: the keys of a dict that are wanted; None wants all.

    Raises:
      UserError: `data` fails, an example holds no arrays, or examples differ in keys, shapes or types.
    """
    name = type(data).__name__
    try:
        if hasattr(data, "__getitems__"):
            examples = list(data.__getitems__(list(numbers)))
        else:
            examples = [data[number] for number in numbers]
    except TfdistError:
        raise
    except Exception as error:
        which = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}, … {numbers[-1]}"
        raise build_error(f"{name}[{which}]", error) from error
    nests = []
    for example, number in zip(examples, numbers, strict=True):
        if columns is not None and isinstance(example, Mapping):
            columns.check(list(example), f"{name}[{number}]")
            example = {key: example[key] for key in columns.names}
        nests.append(_as_arrays(tuple(example) if isinstance(example, list) else example, number))
    for nest, number in zip(nests, numbers, strict=True):
        found = describe_nest(nest)
        if found != (description or found):
            raise UserError(
                f"{name}[{number}] is {found}, and {name}[0] is {description}. Give all examples the same keys, shapes "
                "and types."
            )
    return map_nest(lambda *arrays: np.stack(arrays), *nests)


def map_nest(function: Callable[..., Any], *nests: Any) -> Any:
    """Applies a function to the arrays at each place of nests of one structure, of dicts and tuples."""
    if isinstance(nests[0], dict):
        return {key: map_nest(function, *(nest[key] for nest in nests)) for key in nests[0]}
    if isinstance(nests[0], tuple):
        return tuple(map_nest(function, *parts) for parts in zip(*nests, strict=True))
    return function(*nests)


def describe_nest(nest: Any, *, is_batch: bool = False) -> str:
    """Shapes and types of a nest of arrays, as `({'x': float32[8, 8]}, int64[])`; of a batch those of an example."""
    if isinstance(nest, dict):
        parts = (f"{key!r}: {describe_nest(nest[key], is_batch=is_batch)}" for key in sorted(nest, key=str))
        return "{" + ", ".join(parts) + "}"
    if isinstance(nest, tuple):
        return "(" + ", ".join(describe_nest(part, is_batch=is_batch) for part in nest) + ")"
    return f"{'string' if nest.dtype == object else nest.dtype.name}{list(nest.shape[is_batch:])}"


def _as_arrays(value: Any, number: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_arrays(each, number) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_as_arrays(each, number) for each in value)
    if value is None:
        raise UserError(f"Example {number} is or holds None, which is no value to train on. Leave such examples out.")
    try:
        array = np.array(value, object) if isinstance(value, str | bytes) else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"Example {number} holds a {type(value).__name__}, which is no array: {error}") from error
    if array.dtype.kind in "US":
        array = array.astype(object)
    is_text = array.dtype == object and all(isinstance(item, str | bytes) for item in array.flat)
    if array.dtype.kind not in "biufc" and not is_text:
        raise UserError(f"Example {number} holds a {type(value).__name__}, which is no array of numbers or of texts.")
    return array.astype(np.float32) if array.dtype == np.float64 else array


def begin_process(data: Any) -> None:
    """Keeps a process's copy of the data, leaves signals to the run, and has the process end with it."""
    global _process_data
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _process_data = data


def read_in_process(numbers: Sequence[int], description: str, columns: Columns | None) -> Any:
    """`read_batch` of the process's copy of the data."""
    return read_batch(_process_data, numbers, description, columns)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(EXIT_BUG)
