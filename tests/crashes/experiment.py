"""The parts of experiment.gin: a training in which every kind of state counts, and that can be watched step by step.

Batch normalization moves statistics, dropout draws numbers, Adam keeps slots, the last batch is uneven, and the
callbacks remember what they have seen.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from crashes import hooks
from crashes.pace import end_step

from tfdist.data.sources.sklearn_sets import load_digits

hooks.install()


def build_model(dropout: float = 0.2) -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Dense(24, use_bias=False)(keras.layers.Flatten()(inputs))
    x = keras.layers.Activation("tanh")(keras.layers.BatchNormalization(momentum=0.9)(x))
    x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, keras.layers.Dense(10, name="head")(x))


def read_digits(num_examples: int, times: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Some of the digits, again and again if that is asked for."""
    images, labels = load_digits(split="all")
    return np.tile(images[:num_examples], (times, 1, 1, 1)), np.tile(labels[:num_examples], times)


class Paced(keras.callbacks.Callback):
    """Ends each step as `pace.end_step` does."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        end_step(int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)))
