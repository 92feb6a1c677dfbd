"""Trains a model in stages, up to an epoch of two, and tells where its variables lie and whether stages overlap.

    python -m training.staged DIRECTORY STRATEGY EPOCHS [meeting]

STRATEGY: as in equivalence/cases.py. meeting: has a stage wait until another one has the next microbatch.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from equivalence.cases import STRATEGIES, clipped_adam, staged_model
from training.trainings import run_program, train_base

MICROBATCHES = 4
WAIT = 5.0  # seconds; a stage that waits for others in vain goes on then
TRIES = 12  # a thread that waits may be the one that should have computed the other stage


class Meets(keras.layers.Layer):
    """Passes on its inputs; the late one waits until one more microbatch has come to the early one than to itself."""

    arrival = threading.Condition()
    early = late = 0  # microbatches that came
    met: bool | None = None

    def __init__(self, name: str, *, waits: bool) -> None:
        super().__init__(name=name)
        self._waits = waits

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        # TensorFlow would compute one after the other what has a state.
        return inputs + tf.reshape(tf.numpy_function(self._note, [inputs], tf.float32, stateful=False), [])

    def _note(self, inputs: np.ndarray) -> np.float32:
        with Meets.arrival:
            if not self._waits:
                Meets.early += 1
                Meets.arrival.notify_all()
                return np.float32(0.0)
            Meets.late += 1
            is_last = Meets.late % MICROBATCHES == 0
            if not Meets.met and not is_last and Meets.late <= TRIES * MICROBATCHES:
                Meets.met = Meets.arrival.wait_for(lambda: Meets.early > Meets.late, WAIT)
        return np.float32(0.0)


def meeting_model() -> keras.Model:
    inputs = keras.Input((64,))
    x = Meets("early", waits=False)(keras.layers.Dense(16, "tanh")(inputs))
    x = Meets("late", waits=True)(keras.layers.Dense(16, "tanh", name="second")(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


class Tells(keras.callbacks.Callback):
    """Prints on which devices the variables and slots of each layer lie."""

    def on_train_end(self, logs: Any = None) -> None:
        found = {layer.name: sorted({v.value.device[-5:] for v in layer.variables}) for layer in self.model.layers}
        found["slots"] = [v.value.device[-5:] for v in self.model.optimizer.variables if v.value.shape.rank]
        print("found", json.dumps(found | {"met": Meets.met}))


def main(directory: str, strategy_name: str, epochs: str, model: str = "") -> None:
    settings = {
        "model": meeting_model if model == "meeting" else staged_model,
        "optimizer": clipped_adam,
        "num_microbatches": MICROBATCHES,
        "stop_after_epochs": int(epochs) if int(epochs) < 2 else None,
        "callbacks": [Tells()],
    }
    train_base(directory, STRATEGIES[strategy_name](), **settings)


if __name__ == "__main__":
    run_program(main)
