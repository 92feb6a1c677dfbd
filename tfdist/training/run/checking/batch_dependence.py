"""Finds layers whose output for an example depends on the other examples of its batch.

No strategy can repeat such a layer: it sees a whole batch on one device and a part of it on each replica. Each layer is
called once more, on the two halves of what it got. Batch normalization is left out, because it is synchronized, and in
training mode what draws random numbers is, because it cannot be repeated. Called by `--mode=validate`, on a model that
is thrown away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.training.step.randomness import has_seed_generators

MOST_EXAMPLES = 4
TOLERANCE = 1e-3  # of an output's largest value: other kernels for other sizes round otherwise
HALF_PRECISION_TOLERANCE = 3e-2
WHOLE_MODEL = "the model as a whole"
Call = tuple[tuple[Any, ...], dict[str, Any]]


def batch_dependent_layers(model: keras.Model, inputs: Any) -> list[str]:
    """Names of such layers, innermost first; `WHOLE_MODEL` where the outputs do so and no layer alone.

    Args:
      model: built; its layers are called eagerly, some of them several times.
      inputs: what it is called with, a nest of tensors [n, …].
    """
    rows = min(int(tf.nest.flatten(inputs)[0].shape[0]), MOST_EXAMPLES)
    if rows < 2:
        return []
    inputs = tf.nest.map_structure(lambda t: t[:rows], inputs)
    found: list[keras.layers.Layer] = []
    with _frozen_batch_norm(model):
        for training in (False, True):
            for layer, (args, kwargs) in _recorded(model, inputs, training=training):
                is_random = training and has_seed_generators(layer)
                if not is_random and layer not in found and _depends(layer.call, args, kwargs, rows):
                    found.append(layer)
        as_whole = _depends(model, (inputs,), {"training": False}, rows)
    inner = [layer for layer in found if not any(other in found for other in layer._flatten_layers(include_self=False))]
    return [layer.name for layer in inner] or [WHOLE_MODEL] * as_whole


def _recorded(model: keras.Model, inputs: Any, *, training: bool) -> list[tuple[keras.layers.Layer, Call]]:
    """What each layer is called with when the model is."""
    calls: list[tuple[keras.layers.Layer, Call]] = []

    def recording(layer: keras.layers.Layer) -> Callable[..., Any]:
        plain = layer.call

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((layer, (args, kwargs)))
            return plain(*args, **kwargs)

        return call

    layers = [layer for layer in model._flatten_layers(include_self=False) if not isinstance(layer, keras.Model)]
    for layer in layers:
        layer.call = recording(layer)
    try:
        model(inputs, training=training)
    finally:
        for layer in layers:
            del layer.call
    return calls


@contextlib.contextmanager
def _frozen_batch_norm(model: keras.Model) -> Iterator[None]:
    """Batch normalization that is not trainable uses its moving statistics in training mode too."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    before = [layer.trainable for layer in layers]
    try:
        for layer in layers:
            layer.trainable = False
        yield
    finally:
        for layer, trainable in zip(layers, before, strict=True):
            layer.trainable = trainable


def _depends(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> bool:
    """Whether the halves of a batch give something else than the whole; False where they cannot be called alone."""
    half = rows // 2

    def part(begin: int, end: int) -> Any:
        some = tf.nest.map_structure(lambda t: t[begin:end] if _is_batch(t, rows) else t, (args, kwargs))
        return call(*some[0], **some[1])

    try:
        whole = tf.nest.flatten(call(*args, **kwargs))
        halves = [tf.nest.flatten(part(0, half)), tf.nest.flatten(part(half, rows))]
    except Exception:  # a layer that keeps a state for each example, say, takes no fewer of them
        return False
    return any(
        _differ(one, tf.concat(two, 0)) for one, *two in zip(whole, *halves, strict=True) if _is_batch(one, rows)
    )


def _is_batch(value: Any, rows: int) -> bool:
    return tf.is_tensor(value) and value.shape.rank != 0 and value.shape[0] == rows


def _differ(one: tf.Tensor, other: tf.Tensor) -> bool:
    if not one.dtype.is_floating or one.shape != other.shape:
        return False
    tolerance = HALF_PRECISION_TOLERANCE if one.dtype.size == 2 else TOLERANCE
    one, other = tf.cast(one, tf.float32), tf.cast(other, tf.float32)
    return bool(tf.reduce_max(tf.abs(one - other)) > tolerance * tf.reduce_max(tf.abs(one)))
