"""Models for the TPU compiler: one whose operations can be counted by hand, and some that a TPU cannot run."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

WORDS = np.array([[b"a", b"b"], [b"c", b"a"]] * 32)


def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return images.astype(np.float32), labels.astype(np.int32)


def words() -> tuple[np.ndarray, np.ndarray]:
    return WORDS, np.zeros(len(WORDS), np.int32)


def of(layer: keras.layers.Layer | None = None) -> keras.Model:
    """The digits' classes from what the layer gives."""
    x = keras.Input((64,))
    return keras.Model(x, keras.layers.Dense(10)(x if layer is None else layer(x)))


def dense(units: int = 256) -> keras.Model:
    x = keras.Input((64,))
    h = keras.layers.Dense(units, use_bias=False)(x)
    return keras.Model(x, keras.layers.Dense(10, use_bias=False)(keras.layers.Dense(units, use_bias=False)(h)))


def normalized() -> keras.Model:
    x = keras.Input((64,))
    h = keras.layers.BatchNormalization()(keras.layers.Dense(256, use_bias=False)(x))
    return keras.Model(x, keras.layers.Dense(10)(h))


class Python(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        y = tf.py_function(lambda v: v * 2, [x], x.dtype)
        return tf.ensure_shape(y, x.shape)


class Ragged(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        ragged = tf.RaggedTensor.from_tensor(x, lengths=tf.cast(x[:, 3], tf.int64))
        return x + tf.reduce_sum(ragged.to_tensor(shape=(None, None)))


class Growing(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        def body(i: Any, grown: Any) -> Any:
            return i + 1, tf.concat([grown, x[:, :1]], 1)

        shapes = [tf.TensorShape([]), tf.TensorShape([None, None])]
        count = tf.cast(tf.reduce_max(x), tf.int32)
        _, grown = tf.while_loop(lambda i, _: i < count, body, [0, x[:, :1]], shape_invariants=shapes)
        return x + tf.reduce_sum(grown, 1, keepdims=True)


def of_words() -> keras.Model:
    x = keras.Input((2,), dtype="string")
    h = keras.layers.StringLookup(vocabulary=["a", "b", "c"])(x)
    return keras.Model(x, keras.layers.Dense(10)(keras.layers.Flatten()(keras.layers.Embedding(5, 8)(h))))
