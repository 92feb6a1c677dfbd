"""Parts of the programs of `tools/fuzz_fit.py`, which begin with `from fuzz.fit_parts import *`.

Everything is the same at each call, so that a program that is run by two engines gives both the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["AddedLoss", "Batches", "Counting", "OrZeros", "Stopping", "Sums", "Wrapped"]
__all__ += ["classes", "closeness", "flags", "gap", "generate", "keras", "np", "numbers", "pandas", "tf", "tokens"]
__all__ += ["one_hot", "whole_gap"]


def numbers(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def flags(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, (count, 1)).astype("float32")


def classes(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 3, count)


def one_hot(seed: int, count: int) -> np.ndarray:
    return np.eye(3, dtype="float32")[classes(seed, count)]


def tokens(seed: int, count: int) -> np.ndarray:
    """Sequences of 5 with padding at their end, none of them empty."""
    lengths = np.random.default_rng(seed).integers(1, 6, (count, 1))
    return np.where(np.arange(5) < lengths, np.random.default_rng(seed + 1).integers(1, 7, (count, 5)), 0)


def pandas(nest: Any) -> Any:
    """Arrays as DataFrames and Series."""
    import pandas

    def frame(array: np.ndarray) -> Any:
        return pandas.Series(array) if array.ndim == 1 else pandas.DataFrame(array)

    return keras.tree.map_structure(frame, nest)


def gap(y_true: Any, y_pred: Any) -> Any:
    """A loss, or a metric, for each example."""
    return keras.ops.mean(keras.ops.abs(keras.ops.cast(y_true, y_pred.dtype) - y_pred), axis=-1)


def closeness(y_true: Any, y_pred: Any) -> Any:
    return 1 / (1 + gap(y_true, y_pred))


def whole_gap(y_true: Any, y_pred: Any) -> Any:
    """A loss of the whole batch."""
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(keras.ops.cast(y_true, y_pred.dtype) - y_pred)))


@keras.saving.register_keras_serializable("fuzz")
class Sums(keras.metrics.Metric):
    """A metric of one's own: two sums."""

    def __init__(self, name: str = "sums", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.weight = self.add_weight(name="weight", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = keras.ops.cast(gap(y_true, y_pred), "float32")
        weights = keras.ops.ones_like(values) if sample_weight is None else keras.ops.cast(sample_weight, "float32")
        weights = keras.ops.reshape(weights, keras.ops.shape(values))  # fit makes columns of Series
        self.total.assign_add(keras.ops.sum(values * weights))
        self.weight.assign_add(keras.ops.sum(weights))

    def result(self) -> Any:
        return self.total / self.weight


@keras.saving.register_keras_serializable("fuzz")
class AddedLoss(keras.layers.Layer):
    """Adds the mean of squares to the loss of the model."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


@keras.saving.register_keras_serializable("fuzz")
class OrZeros(keras.layers.Layer):
    """Adds an input that may be None."""

    def call(self, x: Any, more: Any = None) -> Any:
        return x if more is None else x + more

    def compute_output_shape(self, x_shape: Any, more_shape: Any = None) -> Any:
        return x_shape


@keras.saving.register_keras_serializable("fuzz")
class Wrapped(keras.Model):
    """A subclassed model around another one."""

    def __init__(self, inner: keras.Model, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = inner

    def call(self, x: Any, training: bool = False) -> Any:
        return self.inner(x, training=training)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"inner": keras.saving.serialize_keras_object(self.inner)}


class Counting(keras.callbacks.Callback):
    """Has state: a count of batches, and what the epochs' logs were named."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.epochs: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append([epoch, sorted(logs or {})])


class Stopping(keras.callbacks.Callback):
    """Stops the training after so many batches."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            self.model.stop_training = True


class Batches(keras.utils.PyDataset):
    """Parts of arrays; `more` batches are added after an epoch, and batch number `fails_at` raises."""

    def __init__(self, data: Any, size: int, more: int = 0, fails_at: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._data = data
        self._size = size
        self._more = more
        self._fails_at = fails_at
        self._count = -(-len(keras.tree.flatten(data)[0]) // size)

    @property
    def num_batches(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if index == self._fails_at:
            raise LookupError("the file of a batch is gone")
        begin = index * self._size
        part = keras.tree.map_structure(lambda array: array[begin : begin + self._size], self._data)
        if not len(keras.tree.flatten(part)[0]):  # of those that were added
            return self[0]
        return part

    def on_epoch_end(self) -> None:
        self._count += self._more


def generate(data: Any, size: int) -> Iterator[Any]:
    batches = Batches(data, size)
    while True:
        for index in range(batches.num_batches):
            yield batches[index]
