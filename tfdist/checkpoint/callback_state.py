"""The state of Keras callbacks, as far as it is plain data: what EarlyStopping counted, what History collected.

Invariant: only what a callback changed since training began is kept, so that a setting which the user changed before
resuming stays changed. Whoever runs callbacks takes a `Baseline` once all of them had `on_train_begin`.
"""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import logging
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfdist.checkpoint.format.manifest import DamagedCheckpoint

# Set by Keras, or true of a process and not of the training.
NO_STATE = ("params", "_is_tracing", "_profiler_started", "_async_futures")
# With its comparison, which is a function, a callback of Keras that monitors a metric also turns this number's sign.
SET_UP_ONCE = ("min_delta",)
_ARRAY, _TUPLE, _ITEMS, _PAIRS, _VARIABLE = "$array", "$tuple", "$items", "$pairs", "$variable"
_SEQUENCES = {kind.__name__: kind for kind in (set, frozenset, collections.deque)}
_MAPPINGS = {kind.__name__: kind for kind in (dict, collections.Counter, collections.OrderedDict)}
# Of these a checkpoint keeps nothing where a part of them is no plain data; other objects are no state.
_DATA = (
    *(*_SEQUENCES.values(), dict, list, tuple, np.ndarray, bytes, bytearray, complex, enum.Enum, pathlib.PurePath),
    *(datetime.date, datetime.time, datetime.timedelta),
)
_LOG = logging.getLogger(__name__)


class _Variable(NamedTuple):
    """The value of a variable of the callback's own."""

    value: np.ndarray


class Baseline:
    """Attributes of callbacks when training began.

    Args:
      callbacks: in their order; the n-th of a class is the n-th of that class in a later run.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks = _name_callbacks(callbacks)
        self._before = {name: _read_plain_attributes(callback) for name, callback in self._callbacks.items()}
        self._unkept = {name: _find_unkept(callback) for name, callback in self._callbacks.items()}
        self._warned: set[tuple[str, str]] = set()

    def changes(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Values that JSON can hold, by callback and attribute, and the arrays that they refer to by name.

        Warns once of an attribute that changed and cannot be kept.
        """
        arrays: dict[str, np.ndarray] = {}
        values: dict[str, Any] = {}
        for name, callback in self._callbacks.items():
            changed = {
                attribute: _encode(value, f"callbacks/{name}.{attribute}", arrays)
                for attribute, value in _read_plain_attributes(callback, copied=False).items()
                if attribute not in self._before[name] or not _is_same(value, self._before[name][attribute])
            }
            if changed:
                values[name] = changed
            self._warn_missing(name, callback)
        return values, arrays

    def reset(self) -> None:
        """Sets the attributes to what they were."""
        for name, attributes in self._before.items():
            for attribute, value in copy.deepcopy(attributes).items():
                _set_attribute(self._callbacks[name], attribute, value)

    def _warn_missing(self, name: str, callback: Any) -> None:
        before = self._unkept[name]
        for attribute, now in _find_unkept(callback).items():
            if now != before.get(attribute) and (name, attribute) not in self._warned:
                self._warned.add((name, attribute))
                _LOG.warning(
                    "%s.%s cannot be kept in checkpoints: a resumed run begins with what on_train_begin sets. "
                    "Checkpoints keep numbers, texts and arrays, and lists, dicts, sets and variables of them.",
                    type(callback).__name__,
                    attribute,
                )

    def restore(self, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[str]:
        """Sets what `changes` gave; the names of callbacks that are not there any more."""
        for name, attributes in values.items():
            if name in self._callbacks:
                for attribute, value in attributes.items():
                    if not _is_state(self._callbacks[name], attribute):
                        raise DamagedCheckpoint(f"it gives {name} an attribute {attribute!r}, which is no state of it")
                    _set_attribute(self._callbacks[name], attribute, _decode(value, arrays))
        return [name for name in values if name not in self._callbacks]


def _is_state(callback: Any, attribute: str) -> bool:
    """Returns whether `changes` may contain an attribute: what a class defines, such as a method, is no state."""
    is_name = attribute.isidentifier() and not attribute.startswith("__") and attribute.strip("_") != "model"
    return is_name and attribute not in NO_STATE and not callable(getattr(type(callback), attribute, None))


def _name_callbacks(callbacks: Iterable[Any]) -> dict[str, Any]:
    seen: collections.Counter[str] = collections.Counter()
    named = {}
    for callback in callbacks:
        kind = type(callback).__name__
        named[f"{kind}.{seen[kind]}"] = callback
        seen[kind] += 1
    return named


def _read_plain_attributes(callback: Any, *, copied: bool = True) -> dict[str, Any]:
    left_out = NO_STATE + SET_UP_ONCE if hasattr(callback, "monitor_op") else NO_STATE
    values = {name: _plain_value(callback, value) for name, value in vars(callback).items() if name not in left_out}
    found = {name: value for name, value in values.items() if isinstance(value, _Variable) or _is_plain(value)}
    return copy.deepcopy(found) if copied else found


def _find_unkept(callback: Any) -> dict[str, tuple[int, int]]:
    """Finds attributes that no checkpoint stores: the id and the length of each value."""
    kept = _read_plain_attributes(callback, copied=False)
    found = {name: value for name, value in vars(callback).items() if name not in kept and isinstance(value, _DATA)}
    found = {name: value for name, value in found.items() if name not in NO_STATE + SET_UP_ONCE}
    return {name: (id(value), len(value) if hasattr(value, "__len__") else 0) for name, value in found.items()}


def _plain_value(callback: Any, value: Any) -> Any:
    """An attribute's value, with what `_set_attribute` needs no copy of taken off: a default factory, a variable."""
    if type(value) is collections.defaultdict:
        return dict(value)
    if hasattr(value, "assign") and hasattr(value, "numpy") and not _is_of_model(callback, value):
        return _Variable(np.asarray(value.numpy()))
    return value


def _set_attribute(callback: Any, attribute: str, value: Any) -> None:
    now = getattr(callback, attribute, None)
    if isinstance(value, _Variable):
        setattr(callback, attribute, value.value) if now is None else now.assign(value.value)
    elif type(now) is collections.defaultdict and type(value) is dict:
        setattr(callback, attribute, collections.defaultdict(now.default_factory, value))
    else:
        setattr(callback, attribute, value)


def _is_of_model(callback: Any, variable: Any) -> bool:
    """Whether a checkpoint has the variable as one of the model's or the optimizer's."""
    model = getattr(callback, "model", None)
    of_model = [*getattr(model, "variables", ()), *getattr(getattr(model, "optimizer", None), "variables", ())]
    return any(variable is each or variable is each.value for each in of_model)


def _is_plain(value: Any) -> bool:
    """Returns whether a value, read back, is what it was; an instance of a subclass would be one of its base."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc" or value.dtype.name.startswith(("bfloat16", "float8"))
    if type(value) in (list, tuple, *_SEQUENCES.values()):
        return all(map(_is_plain, value))
    if type(value) in _MAPPINGS.values():
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case np.ndarray():
            return one.dtype == other.dtype and np.array_equal(one, other)
        case list() | tuple() | collections.deque():
            return len(one) == len(other) and all(map(_is_same, one, other))
        case dict():
            return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _encode(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """`value` with what a manifest cannot hold as an object of its own: arrays by name, and tuples."""
    match value:
        case np.ndarray() | np.generic():
            arrays[name] = np.array(value)
            return {_ARRAY: name, "scalar": isinstance(value, np.generic)}
        case list():
            return [_encode(item, f"{name}.{index}", arrays) for index, item in enumerate(value)]
        case _Variable():
            arrays[name] = value.value
            return {_VARIABLE: name}
        case tuple():
            return {_TUPLE: [_encode(item, f"{name}.{index}", arrays) for index, item in enumerate(value)]}
        case set() | frozenset() | collections.deque():
            items = [_encode(item, f"{name}.{index}", arrays) for index, item in enumerate(value)]
            return {_ITEMS: items, "kind": type(value).__name__, "maxlen": getattr(value, "maxlen", None)}
        case dict() if type(value) is dict and all(isinstance(key, str) and key[:1] != "$" for key in value):
            return {key: _encode(item, f"{name}.{key}", arrays) for key, item in value.items()}
        case dict():
            pairs = [[key, item] for key, item in value.items()]
            return {_PAIRS: _encode(pairs, name, arrays), "kind": type(value).__name__}
    return value


def _decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    match value:
        case {"$array": name, "scalar": scalar}:
            return arrays[name][()] if scalar else np.array(arrays[name])
        case {"$tuple": items}:
            return tuple(_decode(item, arrays) for item in items)
        case {"$variable": name}:
            return _Variable(np.array(arrays[name]))
        case {"$items": items, "kind": "deque", "maxlen": maxlen}:
            return collections.deque(_decode(items, arrays), maxlen)
        case {"$items": items, "kind": ("set" | "frozenset") as kind}:
            return _SEQUENCES[kind](_decode(items, arrays))
        case {"$pairs": pairs, "kind": ("dict" | "Counter" | "OrderedDict") as kind}:
            return _MAPPINGS[kind](dict(_decode(pairs, arrays)))
        case list():
            return [_decode(item, arrays) for item in value]
        case dict():
            return {key: _decode(item, arrays) for key, item in value.items()}
    return value
