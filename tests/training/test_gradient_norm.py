"""The norm of the gradients is NumPy's, and changes no weight; other strategies: the case `clipnorm`."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import dense_model, digits, embedding_model, words
from training.trainings import run

from tfdist.training.step import gradients

pytestmark = pytest.mark.slow
ONE_STEP: dict[str, Any] = {
    "train_data": lambda: digits(64),
    "eval_data": None,
    "epochs": 1,
    "shuffle": False,
    "deterministic": True,
    "optimizer": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
}


def beginning_with(weights: list[np.ndarray]) -> keras.Model:
    model = dense_model()
    model.set_weights(weights)
    return model


def norm_by_hand(start: list[np.ndarray]) -> float:
    """Of the gradients of the one step."""
    model = beginning_with(start)
    images, labels = digits(64)
    values = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, model(images))
    return float(np.sqrt(sum((g.numpy().astype(np.float64) ** 2).sum() for g in tape.gradient(loss, values))))


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_norm_is_that_of_numpy(tmp_path: pathlib.Path, precision: str) -> None:
    start = dense_model().get_weights()
    settings = ONE_STEP | {"model": functools.partial(beginning_with, start), "precision": precision}
    found = run(tmp_path / "a", **settings, log_gradient_norm=True)
    (point,) = found.points("train")
    assert point["gradient_norm"] == pytest.approx(norm_by_hand(start), rel=1e-4 if precision == "float32" else 1e-2)
    without = run(tmp_path / "b", **settings)
    assert found.bits() == without.bits() and "gradient_norm" not in without.points("train")[0]


@pytest.mark.parametrize("xla", ["off", "update", "on"])
def test_rows_that_come_several_times_are_added_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, xla: str
) -> None:
    """A large embedding's gradient comes as rows; what XLA compiles adds them up in the update alone."""
    settings = ONE_STEP | {
        "model": lambda: embedding_model(70_016),
        "train_data": lambda: words(64),  # each of them some times in a batch
        "optimizer": lambda: keras.optimizers.Adam(3e-3),
        "log_gradient_norm": True,
        "xla": xla,
    }
    rows = run(tmp_path / "rows", **settings)
    monkeypatch.setattr(gradients, "SPARSE_FROM_ELEMENTS", 2**40)
    dense = run(tmp_path / "dense", **settings)
    for ours, theirs in zip(rows.weights(), dense.weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert rows.points("train")[-1]["gradient_norm"] == pytest.approx(
        dense.points("train")[-1]["gradient_norm"], rel=1e-5
    )
