"""Weights of classes, as `keras.Model.fit(class_weight=…)` takes them.

Invariant: an example weighs what `fit` would let it weigh; a class without a weight weighs 1. They multiply the loss of
training alone, not metrics and not evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import UserError, is_whole_number


def checked_class_weight(given: Any) -> dict[int, float] | None:
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


def weights_of(labels: Any, class_weight: Mapping[int, float]) -> tf.Tensor:
    """float32 [n], the weight of each example.

    Args:
      labels: [n] or [n, 1] class numbers, or [n, classes] of which the largest counts.
      class_weight: weights by class number.

    Raises:
      UserError: the labels are of another shape.
    """
    if not tf.is_tensor(labels) or labels.shape.rank not in (1, 2):
        raise UserError("class_weight is for one output whose targets are of shape [n], [n, 1] or [n, classes].")
    if labels.shape.rank == 2:
        labels = tf.squeeze(labels, -1) if labels.shape[-1] == 1 else tf.argmax(labels, axis=-1)
    if labels.dtype.is_floating:
        labels = tf.round(labels)
    labels = tf.cast(labels, tf.int32)
    table = np.ones(max(class_weight) + 2, np.float32)  # the last entry is that of all classes without a weight
    for number, weight in class_weight.items():
        table[number] = weight
    known = (labels >= 0) & (labels < len(table))
    return tf.gather(tf.constant(table), tf.where(known, labels, len(table) - 1))
