"""Microbatches of a step follow each other, so that only one of them holds its activations."""

from __future__ import annotations

import pathlib
import threading

import keras
import pytest
import tensorflow as tf
from training.trainings import run

SECONDS = 0.5  # that a backward pass waits for whoever would overtake it


class Marks(keras.layers.Layer):
    """What it is given; its backward pass ends when another microbatch has come, or none has for a while.

    Its functions have no state, as TensorFlow would call those that have one after the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._overtaken = threading.Event()

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if not tf.is_tensor(inputs):  # Keras asks for the shape
            return inputs

        @tf.custom_gradient
        def marked(values: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self._mark("forward", values), lambda upstream: self._mark("backward", upstream)

        return marked(inputs)

    def _mark(self, which: str, values: tf.Tensor) -> tf.Tensor:
        def mark(given: object) -> object:
            if which == "forward":
                self._overtaken.set()
            else:
                self._overtaken.clear()
                self._overtaken.wait(SECONDS)
            self.seen.append(which)
            return given

        return tf.ensure_shape(tf.numpy_function(mark, [values], values.dtype, stateful=False), values.shape)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [64, 66], ids=["of one size", "of several"])
def test_a_microbatch_begins_when_the_one_before_has_its_gradients(tmp_path: pathlib.Path, batch_size: int) -> None:
    marks = Marks()

    def model() -> keras.Model:
        inputs = keras.Input((64,))
        return keras.Model(inputs, keras.layers.Dense(10)(marks(keras.layers.Dense(8)(inputs))))

    run(
        tmp_path,
        model=model,
        global_batch_size=batch_size,
        drop_remainder=True,
        num_microbatches=4,
        steps=1,
        eval_data=None,
        xla="off",
        fast_check=False,
    )
    assert marks.seen[-8:] == ["forward", "backward"] * 4
