"""Small experiments that do not train alike on one device and on two replicas, each by one fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.tasks.supervised import Supervised

ROWS, FEATURES = 96, 6
SMALL = keras.initializers.Constant(0.1)


def load_rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32)


def load_unseeded() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_rows()
    return x + np.random.default_rng().normal(size=x.shape).astype(np.float32), y


def load_global_noise() -> tf.data.Dataset:
    """Adds noise of NumPy's global generator to each row when it is read."""

    def add_noise(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        noise = tf.numpy_function(lambda: np.random.normal(size=FEATURES).astype(np.float32), [], tf.float32)
        return x + tf.ensure_shape(noise, [FEATURES]), y

    return tf.data.Dataset.from_tensor_slices(load_rows()).map(add_noise)


def load_whole_batches() -> tuple[np.ndarray, np.ndarray]:
    """Leaves out the rows that do not fill a batch of 16 on each device."""
    size = 16 * len(tf.config.list_logical_devices("CPU"))
    x, y = load_rows()
    return x[: 80 // size * size], y[: 80 // size * size]


class Centered(keras.layers.Layer):
    """Subtracts the mean of the rows that it gets."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs - keras.ops.mean(inputs, axis=0)


class LaterCentered(Centered):
    """Counts the steps, and centers from the third on."""

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(name="steps", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.steps.assign_add(1.0)
        return keras.ops.where(self.steps < 3, inputs, super().call(inputs))


class LargestSeen(keras.layers.Layer):
    """Divides by the largest magnitude so far, which it keeps."""

    def build(self, shape: Any) -> None:
        self.largest = self.add_weight(name="largest", shape=(), initializer=SMALL, trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(keras.ops.abs(inputs))))
        return inputs / self.largest


class Noisy(keras.layers.Layer):
    """Adds noise by TensorFlow's own generator, which does not know of rows."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs + tf.random.normal(tf.shape(inputs))


class NextValue(keras.layers.Layer):
    """Multiplies by the mean of the rows before, which it hands on as a gradient."""

    def build(self, shape: Any) -> None:
        self.last = self.add_weight(name="last", shape=(), initializer="ones", overwrite_with_gradient=True)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        @keras.ops.custom_gradient
        def multiply(inputs: tf.Tensor, last: tf.Tensor) -> tuple[tf.Tensor, object]:
            return inputs * last, lambda upstream: (upstream * last, keras.ops.mean(inputs))

        return multiply(inputs, keras.ops.convert_to_tensor(self.last))


class SharedLoss(keras.losses.Loss):
    """Divides each row's loss by the rows that it gets."""

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        each = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return 16.0 * each / keras.ops.cast(keras.ops.shape(each)[0], "float32")


class Largest(keras.metrics.Metric):
    """The largest output."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.value


class Clocked(keras.callbacks.Callback):
    """Changes the rate by what the clock shows."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.01 + time.time_ns() % 1000 / 1e5


class Skipping(keras.optimizers.SGD):
    """Skips each third update that Python sees, of a variable on a replica."""

    num_updates = 0

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.num_updates += 1
        if self.num_updates % 3:
            super().update_step(gradient, variable, learning_rate)


LAYERS: dict[str, Callable[[], keras.layers.Layer]] = {
    "mean of the batch": Centered,
    "mean of the batch from step 3 on": LaterCentered,
    "largest seen": LargestSeen,
    "noise without a seed": Noisy,
    "next value": NextValue,
}


def build_model(fault: str = "") -> keras.Model:
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Dense(8, "tanh")(inputs)
    x = keras.layers.Dropout(0.3)(LAYERS[fault]()(x) if fault in LAYERS else x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


def build_task(fault: str = "") -> Supervised:
    plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = SharedLoss() if fault == "loss of the rows" else plain
    return Supervised(loss=loss, metrics=[Largest if fault == "largest output" else "accuracy"])
