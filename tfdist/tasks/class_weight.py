"""Weights of classes, as `keras.Model.fit(class_weight=…)` takes them.

Invariant: an example weighs what `fit` would let it weigh; a class without a weight weighs 1. They multiply the loss of
training alone, not metrics and not evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UserError, is_whole_number


def check_class_weight(given: Any) -> dict[int, float] | None:
    """Raises UserError where `given` is no {class: weight}, with whole numbers from 0 on for classes."""
    if given is None:
        return None
    is_weight = (int, float, np.integer, np.floating)
    if (
        not isinstance(given, Mapping)
        or not given
        or not all(is_whole_number(c, least=0) and isinstance(w, is_weight) and w >= 0 for c, w in given.items())
    ):
        raise UserError(
            f"class_weight is {given!r}; write a dict of weights by class number, {{0: 1.0, 1: 20.0}}. A class without "
            "one weighs 1."
        )
    return {int(c): float(w) for c, w in given.items()}


def weigh_classes(labels: Any, class_weight: Mapping[int, float]) -> tf.Tensor:
    """float32 [n], the weight of each example, or [n, positions] of each position.

    Args:
      labels: [n], [n, 1] or [n, positions, 1] class numbers, or [n, classes] or [n, positions, classes] of which the
        largest counts.
      class_weight: weights by class number.

    Raises:
      UserError: the labels are no tensor with such axes.
    """
    if not tf.is_tensor(labels) or not labels.shape.rank:
        raise UserError("class_weight is for one output whose targets are of shape [n], [n, 1] or [n, classes].")
    if labels.shape.rank > 1:
        labels = tf.squeeze(labels, -1) if labels.shape[-1] == 1 else tf.argmax(labels, axis=-1)
    if labels.dtype.is_floating:
        labels = tf.round(labels)
    is_class = tf.cast(labels, tf.int64)[..., tf.newaxis] == tf.constant(list(class_weight), tf.int64)
    weights = tf.reduce_sum(tf.where(is_class, tf.constant(list(class_weight.values()), tf.float32), 0.0), axis=-1)
    return tf.where(tf.reduce_any(is_class, axis=-1), weights, 1.0)


def check_one_class(loss: Any, labels: Any) -> None:
    """Raises UserError where the targets of a loss hold a class for each of several positions of an example.

    Args:
      loss: a Keras loss, a function or a name.
      labels: a tensor or its `TensorSpec`.
    """
    if isinstance(loss, str) and "sparse" in loss.lower():
        loss = keras.losses.get(loss)
    function = getattr(loss, "function", getattr(loss, "fn", loss))
    shape = getattr(labels, "shape", tf.TensorShape(None))
    if function is keras.losses.sparse_categorical_crossentropy and shape.rank == 2 and shape[-1] != 1:
        raise UserError(
            f"class_weight weighs each example by its one class, and the targets, of shape {list(shape)}, hold a class "
            "for each position. Leave it out, and give a sample_weight of that shape."
        )
