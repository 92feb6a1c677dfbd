"""Trains digits for some epochs with a trial of XLA from the second call on, however short the run is.

    python -m training.xla_trials DIRECTORY STRATEGY

STRATEGY: as in equivalence/cases.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from equivalence.cases import STRATEGIES
from training.trainings import run_program, train_base

from tfdist.training.run import tuned as xla_trial

FORCED = {"FIRST_SHARE": 1e9, "OTHERS_SHARE": 1e9, "FIRST_LOOK": 2, "ROUNDS": 2}
SETTINGS: dict[str, Any] = {"epochs": 4, "deterministic": False, "steps_per_call": 1, "eval_data": None, "xla": "auto"}


@contextlib.contextmanager
def trials() -> Iterator[None]:
    with mock.patch.multiple(xla_trial, **FORCED):  # type: ignore[call-overload]
        yield


def force() -> None:
    """As `trials`, for as long as this process lasts."""
    for name, value in FORCED.items():
        setattr(xla_trial, name, value)


@keras.saving.register_keras_serializable("tests")
class Interpreted(keras.layers.Layer):
    """Adds nothing, by code that XLA cannot compile."""

    def call(self, inputs: Any) -> Any:
        zeros = tf.numpy_function(lambda x: 0 * x, [tf.stop_gradient(inputs)], tf.float32)
        return inputs + tf.ensure_shape(zeros, inputs.shape)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


def interpreted_model() -> keras.Model:
    inputs = keras.Input((64,))
    return keras.Model(inputs, keras.layers.Dense(10)(Interpreted()(inputs)))


def main(directory: str, strategy_name: str) -> None:
    with trials():
        train_base(directory, STRATEGIES[strategy_name](), **SETTINGS)


if __name__ == "__main__":
    run_program(main)
