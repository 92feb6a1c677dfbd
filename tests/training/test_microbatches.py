"""Microbatches of a step follow each other, and a run that continues with fewer workers has more of them."""

from __future__ import annotations

import pathlib
import threading
import types
from typing import Any

import keras
import pytest
import tensorflow as tf
from checkpoint.checkpoints import Listener
from training.trainings import run

import tfdist
from tfdist.data.batches import BatchPlan
from tfdist.strategies.cluster.environment import ALL_WORKERS_VARIABLE
from tfdist.training.run.assembly import scale_microbatches

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


def slices_of(layer: keras.layers.Layer, *, workers: int, slices: int = 1, batch: int = 64) -> tuple[int, list[str]]:
    """The microbatches with so many workers, and what is said of them."""
    events = Listener()
    topology = types.SimpleNamespace(num_workers=workers)
    run: Any = types.SimpleNamespace(topology=topology, events=events)
    learner: Any = types.SimpleNamespace(model=keras.Sequential([keras.Input((4,)), layer]))
    plan = BatchPlan(num_examples=640, global_batch_size=batch, num_replicas=workers, num_microbatches=slices)
    made = scale_microbatches(run, learner, plan)
    assert made.global_batch_size == batch and made.num_replicas == workers
    assert events.told == events.events("fewer_workers")
    return made.num_microbatches, [str(message) for *_, message in events.told]


def test_slices_are_no_larger_than_with_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slices_of(keras.layers.Dense(1), workers=2) == (1, [])
    monkeypatch.setenv(ALL_WORKERS_VARIABLE, "3")
    assert slices_of(keras.layers.Dense(1), workers=3) == (1, [])
    slices, messages = slices_of(keras.layers.Dense(1), workers=2)
    assert slices == 2 and messages == [
        "2 of 3 workers train; each computes its part of a batch in 2 slices in place of 1."
    ]
    assert slices_of(keras.layers.Dense(1), workers=1, slices=4)[0] == 12


@pytest.mark.slow
def test_the_rows_of_an_embedding_and_its_gradient_as_a_tensor_add_up() -> None:
    def trained(num_microbatches: int) -> tf.Tensor:
        keras.utils.set_random_seed(1)
        words, layer = keras.Input((3,), dtype="int32"), keras.layers.Embedding(2**18, 4)
        tied = keras.layers.Lambda(lambda each: tf.ones_like(each, "float32") @ layer.embeddings[:3], (4,))
        model = keras.Model(words, [keras.ops.mean(layer(words), axis=1), tied(words)])
        model.compile("sgd", [keras.losses.MeanSquaredError(reduction="sum"), "mse"])
        x, y = tf.reshape(tf.range(24), (8, 3)), [tf.ones((8, 4))] * 2
        tfdist.fit(model, x, y, batch_size=8, num_microbatches=num_microbatches, verbose=0)
        return tf.convert_to_tensor(layer.embeddings)

    assert float(tf.reduce_max(tf.abs(trained(1) - trained(2)))) < 1e-6


@pytest.mark.slow
def test_a_model_that_takes_statistics_of_a_slice_keeps_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALL_WORKERS_VARIABLE, "3")
    slices, (message,) = slices_of(keras.layers.BatchNormalization(name="norm"), workers=2)
    assert slices == 1 and "takes statistics of them (norm)" in message
    slices, (message,) = slices_of(keras.layers.Dense(1), workers=2, batch=3)
    assert slices == 1 and "the batch is too small" in message
