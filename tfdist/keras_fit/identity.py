"""What a run directory of `tfdist.fit` is known by: the model, the optimizer, the loss and the examples of its call.

Invariant: what stays the same is said in the same words in another process, whatever names Keras gave its layers.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tfdist.data.pipeline.pipeline import digest_arrays
from tfdist.data.sources.source import Source
from tfdist.telemetry.json_text import to_json

_NAMES = ("name", "dtype", "build_config", "registered_name")
# What callbacks leave of an optimizer that a second call of this process continues with, and what it was at first.
_began: weakref.WeakKeyDictionary[Any, tuple[str, str]] = weakref.WeakKeyDictionary()


def identity_of(model: keras.Model, source: Source) -> dict[str, str]:
    """The settings of a call, by which `check_same_experiment` compares it; the contents of arrays alone count."""
    optimizer = _text(model.optimizer)
    left, first = _began.get(model.optimizer, ("", ""))
    found = {
        "fit.model": _digest(_layers(model)),
        "fit.optimizer": first if optimizer == left else optimizer,
        "fit.loss": _text(model.loss),
    }
    if (held := source.arrays_in_memory()) is not None:
        found["fit.data"] = digest_arrays(keras.tree.flatten(held))
    return found


def note_end(model: keras.Model, began: Mapping[str, str]) -> None:
    """Notes what a call that had the identity `began` leaves of its optimizer."""
    if "fit.optimizer" in began:
        _began[model.optimizer] = (_text(model.optimizer), began["fit.optimizer"])


def _text(part: Any) -> str:
    """An optimizer, a loss, or a nest of losses, as somebody would write it."""
    if isinstance(part, Mapping):
        return "{" + ", ".join(f"{name!r}: {_text(each)}" for name, each in part.items()) + "}"
    if isinstance(part, list | tuple):
        return "[" + ", ".join(map(_text, part)) + "]"
    if not isinstance(part, keras.Optimizer | keras.Loss):
        return getattr(part, "__name__", None) or str(part)
    config = _config(part)
    return f"{type(part).__name__}({', '.join(f'{name}={value!r}' for name, value in config.items())})"


def _config(part: Any) -> dict[str, Any]:
    """The settings of a part, as far as it tells them."""
    try:
        return dict(_plain(part.get_config()))
    except (NotImplementedError, TypeError, ValueError):  # of the user's own
        return {}


def _layers(model: Any) -> list[Any]:
    """Classes and settings of all layers, in their order."""
    return [
        [type(layer).__name__, _layers(layer) if hasattr(layer, "layers") else _config(layer)] for layer in model.layers
    ]


def _plain(config: Any) -> Any:
    """A configuration without names and types, which a process counts."""
    if isinstance(config, Mapping):
        return {str(name): _plain(value) for name, value in config.items() if name not in _NAMES}
    if isinstance(config, list | tuple):
        return [_plain(each) for each in config]
    if config is None or isinstance(config, bool | int | float | str):
        return config
    return config.item() if isinstance(config, np.generic) else re.sub(r" at 0x\w+", "", str(config))


def _digest(nest: Any) -> str:
    return digest_arrays([np.frombuffer(to_json(nest).encode(), np.uint8)])
