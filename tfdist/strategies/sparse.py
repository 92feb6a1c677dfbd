"""Gradients of large embeddings, which come as a few rows of many (`tf.IndexedSlices`)."""

from __future__ import annotations

from typing import TypeAlias

import tensorflow as tf

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"


def without_repeats(gradient: Gradient) -> Gradient:
    """Adds up the rows of one index, so that less is sent, and norms are those of the dense gradient."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
