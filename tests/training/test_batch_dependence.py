"""Layers that look at the rest of their batch are found by `--mode=validate`, and named."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import BASE, convnet_model, dense_model, digits

from tfdist.experiment import validate
from tfdist.strategies.one_device import OneDevice
from tfdist.training.run.checking.batch_dependence import WHOLE_MODEL, batch_dependent_layers
from tfdist.training.run.settings import TrainSettings

layers = keras.layers


class Centered(layers.Layer):
    """Takes the batch's mean off, always or in training only."""

    def __init__(self, *, always: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.always = always

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs - keras.ops.mean(inputs, 0, keepdims=True) if self.always or training else inputs


def around(*bodies: Callable[[Any], Any]) -> keras.Model:
    inputs = x = keras.Input((64,))
    for body in bodies:
        x = body(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def inside() -> keras.Model:
    inner = keras.Sequential([keras.Input((64,)), layers.Dense(8), Centered(name="inner")])
    return around(inner)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: around(Centered(name="centered")), ["centered"]),
        (lambda: around(layers.Dropout(0.5), Centered(always=False, name="late")), ["late"]),
        (lambda: around(Centered(name="one"), layers.Dense(6), Centered(name="two")), ["one", "two"]),
        (inside, ["inner"]),
        (lambda: around(layers.Lambda(lambda x: x / keras.ops.sum(x), name="scaled")), ["scaled"]),
        (lambda: around(lambda x: x - keras.ops.mean(x, 0, keepdims=True)), [WHOLE_MODEL]),
        (lambda: dense_model(batch_norm=True), []),
        (convnet_model, []),
        (lambda: around(layers.Dropout(0.5), layers.LayerNormalization(), layers.GaussianNoise(1.0)), []),
        (lambda: around(layers.Reshape((8, 8)), layers.GRU(4)), []),
    ],
)
def test_layers_that_see_their_batch_are_named(model: Callable[[], keras.Model], expected: list[str]) -> None:
    built = model()
    inputs = tf.constant(digits(21)[0])
    before = [w.copy() for w in built.get_weights()]
    assert batch_dependent_layers(built, inputs) == expected
    assert all("call" not in vars(layer) and layer.trainable for layer in built._flatten_layers())
    assert all(np.array_equal(a, b) for a, b in zip(before, built.get_weights(), strict=True))


@pytest.mark.slow
def test_validate_names_them_and_says_what_microbatches_change(tmp_path: pathlib.Path) -> None:
    told: list[str] = []
    settings = BASE | {"model": lambda: around(layers.BatchNormalization(name="norm"), Centered(name="centered"))}
    settings["task"] = settings["task"]()
    validate(TrainSettings(strategy=OneDevice(), num_microbatches=2, **settings), told.append)
    notes = [line for line in told if line.startswith("note: ")]
    assert len(notes) == 2
    assert "(norm) takes the statistics of each of the 2 microbatches, not of the whole batch of 64" in notes[0]
    assert notes[1].startswith("note: What centered gives for an example depends on the other examples")
