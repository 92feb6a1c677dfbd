"""Tells when a training has done its first steps, and ends the process; as a command, a plain Keras script that does.

Used by start.py, in the processes that train.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import keras
from start import STEP_FILE


class EndsSoon(keras.callbacks.Callback):
    def on_train_begin(self, logs: object = None) -> None:
        steps, self._path = os.environ[STEP_FILE].split(maxsplit=1)
        self._left = int(steps)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._left -= 1
        if not self._left:
            Path(self._path).write_text(f"{time.time():.6f}")
            os._exit(0)


def main() -> None:
    from sklearn.datasets import load_digits

    from tfdist.models.convnet import build_convnet  # of Keras's layers alone

    images, labels = load_digits(return_X_y=True)
    model = build_convnet(input_shape=(8, 8, 1), num_classes=10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss=loss, metrics=["accuracy"])
    x = (images / 16).astype("float32").reshape([-1, 8, 8, 1])
    model.fit(x, labels, batch_size=64, verbose=0, callbacks=[EndsSoon()])


if __name__ == "__main__":
    main()
