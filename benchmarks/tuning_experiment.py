"""What tuning.py's sweeps train, with tfdist and with KerasTuner alike: the digits by a small network."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

NUM_TRAINING = 1280
BATCH_SIZE = 64


def digits(first: int = 0, last: int = NUM_TRAINING) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [examples, 64] and classes int32 [examples]."""
    images, labels = load_digits(return_X_y=True)
    return (images[first:last] / 16).astype(np.float32), labels[first:last].astype(np.int32)


def build(units: int = 64, dropout: float = 0.0) -> keras.Model:
    inputs = x = keras.Input((64,))
    for _ in range(2):
        x = keras.layers.Dropout(dropout)(keras.layers.Dense(units, "relu")(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


class Pause(keras.callbacks.Callback):
    """Makes each epoch last `seconds` longer, and those of one trial `straggler_seconds`."""

    def __init__(self, seconds: float, straggler_seconds: float = 0.0, number: int = 0, straggler: int = -1) -> None:
        super().__init__()
        self._seconds = straggler_seconds if number == straggler else seconds

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        time.sleep(self._seconds)
