"""The one place that replaces attributes of Keras's and TensorFlow's objects, and puts them back.

Invariant: when a `Patches` or a `SharedPatch` ends, by an exception too, each object that it was told of has the
attributes that it had before, in its own dictionary or its class's. A training has one `Patches` for what it trains.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

# What Keras keeps of how a model is compiled; tests/keras_fit/test_fit.py fails when a name changes.
COMPILED = (
    *("compiled", "optimizer", "loss", "_compile_loss", "_compile_metrics", "_compile_config", "_loss_tracker"),
    *("_compiled_trainable_state", "_run_eagerly", "_jit_compile", "steps_per_execution", "_distribute_strategy"),
    *("train_function", "test_function", "predict_function"),
)
_NOT_THERE = object()


class Patches(contextlib.ExitStack):
    """A context that restores, at its end, the attributes that it replaced, the last first."""

    def restore_at_end(self, owner: object, *names: str) -> None:
        """Puts an object's own attributes back at the end, whatever changes them until then."""
        held = vars(owner)
        self.callback(_put_back, held, {name: held.get(name, _NOT_THERE) for name in names})

    def replace(self, owner: object, **values: Any) -> None:
        """Replaces attributes until the end, past `__setattr__` but for properties and the attributes of a class."""
        for name, value in values.items():
            if isinstance(owner, type):
                undo = setattr if name in vars(owner) else (lambda owner, name, _: delattr(owner, name))
                self.callback(undo, owner, name, vars(owner).get(name))
                setattr(owner, name, value)
            elif hasattr(getattr(type(owner), name, None), "__set__"):
                self.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            else:
                self.restore_at_end(owner, name)
                vars(owner)[name] = value


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _NOT_THERE:
            attributes.pop(name, None)
        else:
            attributes[name] = value


class SharedPatch:
    """A context that replaces attributes of an object, a module perhaps, while any thread is within it."""

    def __init__(self, owner: object, **values: Any) -> None:
        self._owner, self._values = owner, values
        self._lock, self._num_within = threading.Lock(), 0
        self._patches = Patches()

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_within:
                self._patches.replace(self._owner, **self._values)
            self._num_within += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                self._patches.close()
