"""What callbacks have come to know in a run: the best value so far, how long they have waited, the weights they keep.

Invariant: an attribute is part of the state if it is made of numbers, strings, arrays and lists, tuples or dicts of
them, and is no longer what it was when the callback was made. Anything else (a file, a writer, a function) the callback
makes anew when a training begins.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

KERAS_OWN = frozenset({"params", "_model", "model", "validation_data"})
# With its comparison, which is a function, a callback of Keras that monitors a metric also turns this number's sign.
SET_UP_ONCE = frozenset({"min_delta"})
ARRAY, TUPLE = "$array", "$tuple"


class CallbackState:
    """Reads and sets the attributes of callbacks; make it before a hook is called.

    Args:
      callbacks: of the run by their place in the user's list, as far as this worker runs them.
    """

    def __init__(self, callbacks: Mapping[int, keras.callbacks.Callback]) -> None:
        self._callbacks = callbacks
        self._at_first = {place: copy.deepcopy(_plain_attributes(c)) for place, c in callbacks.items()}

    def read(self) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
        """What has changed, for JSON, and the arrays that it refers to by name."""
        arrays: dict[str, np.ndarray] = {}
        found = []
        for place, callback in self._callbacks.items():
            first = self._at_first[place]
            changed = {
                name: _packed(value, f"callbacks/{place}/{name}", arrays)
                for name, value in _plain_attributes(callback).items()
                if name not in first or not _equal(first[name], value)
            }
            found.append({"place": place, "class": type(callback).__name__, "attributes": changed})
        return found, arrays

    def set(self, found: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> None:
        """Puts back what `read` gave; what belongs to a callback that is no longer there is left out."""
        for one in found:
            callback = self._callbacks.get(one["place"])
            if type(callback).__name__ == one["class"]:
                for name, value in one["attributes"].items():
                    setattr(callback, name, _unpacked(value, arrays))


def _plain_attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    left_out = KERAS_OWN | SET_UP_ONCE if hasattr(callback, "monitor_op") else KERAS_OWN
    return {n: v for n, v in vars(callback).items() if n not in left_out and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if isinstance(value, dict):
        return type(value) is dict and all(isinstance(k, str) for k in value) and all(map(_is_plain, value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype != object
    return value is None or isinstance(value, (bool, int, float, str, np.number, np.bool_))


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    return bool(np.array_equal(one, other)) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _packed(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return {ARRAY: name}
    if isinstance(value, tuple):
        return {TUPLE: [_packed(v, f"{name}/{i}", arrays) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_packed(v, f"{name}/{i}", arrays) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return {key: _packed(v, f"{name}/{key}", arrays) for key, v in value.items()}
    return value.item() if isinstance(value, (np.number, np.bool_)) else value


def _unpacked(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_unpacked(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {ARRAY}:
        return np.array(arrays[value[ARRAY]])
    if value.keys() == {TUPLE}:
        return tuple(_unpacked(v, arrays) for v in value[TUPLE])
    return {key: _unpacked(v, arrays) for key, v in value.items()}
