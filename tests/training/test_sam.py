"""Sharpness-aware minimization: the step is its formula, and nothing but the weights moves twice."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import dense_model, digits
from training.trainings import run

from tfdist.errors import UserError

RADIUS, RATE = 0.2, 0.1


def by_hand(start: list[np.ndarray], steps: int) -> list[np.ndarray]:
    """Weights after steps over the digits' batches of 64 in their order."""
    model = dense_model()
    model.set_weights(start)
    images, labels = digits()
    variables = [v.value for v in model.trainable_variables]

    def gradients(batch: slice) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
                labels[batch], model(images[batch], training=True)
            )
        return tape.gradient(loss, variables)

    for step in range(steps):
        batch = slice(64 * step, 64 * step + 64)
        here = [tf.identity(v) for v in variables]
        ascent = gradients(batch)
        norm = tf.linalg.global_norm(ascent)
        for variable, gradient in zip(variables, ascent, strict=True):
            variable.assign_add(RADIUS / norm * gradient)
        for variable, value, gradient in zip(variables, here, gradients(batch), strict=True):
            variable.assign(value - RATE * gradient)
    return model.get_weights()


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(RATE)


def test_a_step_takes_the_gradient_at_the_highest_loss_nearby(tmp_path: pathlib.Path) -> None:
    start: list[Any] = []

    def model() -> keras.Model:
        made = dense_model()
        start.extend(made.get_weights())
        return made

    settings = {"model": model, "optimizer": sgd, "shuffle": False, "epochs": 1, "eval_data": None}
    trained = run(tmp_path / "sam", sam_radius=RADIUS, **settings)
    expected = by_hand(start[:4], steps=7)
    for ours, theirs in zip(trained.weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    plain = run(tmp_path / "plain", **settings)
    assert max(np.abs(a - b).max() for a, b in zip(plain.weights(), expected, strict=True)) > 1e-3


def test_batch_statistics_and_dropout_move_once(tmp_path: pathlib.Path) -> None:
    """With a rate of 0 the weights stay, and all that moves beside them is what a plain step moves."""

    def model() -> keras.Model:
        inputs = keras.Input((64,))
        x = keras.layers.BatchNormalization()(keras.layers.Dense(16)(inputs))
        return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Dropout(0.3)(x)))

    def frozen() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.0)

    settings = {"model": model, "optimizer": frozen, "epochs": 1, "eval_data": None, "deterministic": True}
    plain = run(tmp_path / "plain", **settings)
    sam = run(tmp_path / "sam", sam_radius=RADIUS, **settings)
    assert sam.bits() == plain.bits()
    assert sam.points("train")[-1]["loss"] == plain.points("train")[-1]["loss"]
    assert sam.points("train")[-1]["sparse_categorical_accuracy"] == pytest.approx(
        plain.points("train")[-1]["sparse_categorical_accuracy"]
    )


def test_a_radius_of_nothing_is_refused(tmp_path: pathlib.Path) -> None:
    failed = run(tmp_path, sam_radius=0.0, may_fail=True)
    assert isinstance(failed.error, UserError) and "train.sam_radius is 0.0; write a number above 0" in str(
        failed.error
    )
