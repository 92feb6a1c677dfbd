"""Trains a small model on the scikit-learn digits with `fit` and `tfdist.BackupAndRestore`, for tests to interrupt.

`python fit_digits.py RESULT BACKUP_DIR KIND` writes the final weights and the history to RESULT when all is done.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

BATCH_SIZE = 32
BATCHES = 12
EPOCHS = 3
KINDS = ("arrays", "shuffled", "repeated", "repeated_finite", "unknown_size", "generator", "many_steps_a_call")


def build_model(*, steps_per_execution: int = 1) -> keras.Model:
    """With slots, moving statistics and a seed generator; the same each time."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


all_digits = functools.cache(lambda: load_digits(return_X_y=True))
_WITH_OPTIONS = tf.data.Dataset.with_options


def digits(count: int = BATCH_SIZE * BATCHES) -> tuple[np.ndarray, np.ndarray]:
    images, labels = all_digits()
    return (images[:count] / 16).astype(np.float32), labels[:count]


def without_autotune(dataset: tf.data.Dataset, options: tf.data.Options | None = None) -> tf.data.Dataset:
    """In place of `with_options`: with autotuning, an iterator ends when a thread that sleeps up to a minute has."""
    options = options or tf.data.Options()
    options.autotune.enabled = False
    return _WITH_OPTIONS(dataset, options)


def data(kind: str) -> dict[str, Any]:
    """What `fit` gets, in a dataset of each kind that it treats in its own way."""
    examples = tf.data.Dataset.from_tensor_slices(digits())
    shuffled = without_autotune(examples.shuffle(500, seed=3))

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        images, labels = digits()
        while True:
            for first in range(0, len(labels), BATCH_SIZE):
                yield images[first : first + BATCH_SIZE], labels[first : first + BATCH_SIZE]

    match kind:
        case "arrays":
            images, labels = digits()
            return {"x": images, "y": labels, "batch_size": BATCH_SIZE}  # shuffled by Keras
        case "shuffled":
            return {"x": shuffled.batch(BATCH_SIZE)}
        case "repeated":
            return {"x": shuffled.repeat().batch(BATCH_SIZE), "steps_per_epoch": 7}
        case "repeated_finite":  # two epochs, and then anew
            return {"x": shuffled.batch(BATCH_SIZE), "steps_per_epoch": BATCHES // 2}
        case "unknown_size":
            return {"x": shuffled.filter(lambda image, label: label != 3).batch(BATCH_SIZE)}
        case "generator":
            return {"x": batches(), "steps_per_epoch": 7}
        case "many_steps_a_call":
            return {"x": shuffled.batch(BATCH_SIZE)}
    raise ValueError(kind)


def train(
    kind: str,
    callbacks: list[keras.callbacks.Callback],
    *,
    epochs: int = EPOCHS,
    scope: Callable[[], Any] | None = None,
) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    """The final values of all variables, and the history."""
    steps_per_execution = 5 if kind == "many_steps_a_call" else 1
    if scope is None:
        model = build_model(steps_per_execution=steps_per_execution)
    else:
        with scope():
            model = build_model()
    images, labels = all_digits()
    validation = (images[-128:] / 16).astype(np.float32), labels[-128:]
    history = model.fit(
        **data(kind),
        epochs=epochs,
        validation_data=validation,
        validation_batch_size=BATCH_SIZE,
        callbacks=callbacks,
        verbose=0,
    )
    return [np.array(each.numpy()) for each in [*model.variables, *model.optimizer.variables]], history.history


def main(result: str, backup_dir: str, kind: str) -> None:
    import tfdist

    class Told(keras.callbacks.Callback):
        """Tells the test how far it is, and when a signal would come in an evaluation."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            os.write(1, b"batch\n")

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            os.write(1, b"evaluation\n")

    scope = None
    if kind == "mirrored":
        kind = "arrays"
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        scope = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope
    tf.data.Dataset.with_options = without_autotune  # for the pipelines that Keras makes of arrays
    tf.config.experimental.enable_op_determinism()
    callbacks = [Told()] + ([tfdist.BackupAndRestore(backup_dir, save_freq=1)] if backup_dir else [])
    variables, history = train(kind, callbacks, epochs=6, scope=scope)
    with open(result, "wb") as file:
        np.savez(file, *variables, history=np.array(json.dumps(history)))


if __name__ == "__main__":
    main(*sys.argv[1:])
