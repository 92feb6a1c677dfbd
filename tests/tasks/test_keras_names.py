"""Names mean what they mean to `keras.Model.compile`; a wrong one gets one message with names that are near."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from equivalence.cases import digits, one_hot_digits
from training.trainings import run

from tfdist.tasks.supervised import Supervised

pytestmark = pytest.mark.slow


def softmax_model(units: int = 10) -> keras.Model:
    inputs = keras.Input((64,))
    activation = "softmax" if units > 1 else "sigmoid"
    return keras.Model(inputs, keras.layers.Dense(units, activation=activation)(inputs))


def odd_digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = digits(101)
    return images, (labels % 2).astype(np.float32)[:, np.newaxis]


@pytest.mark.parametrize(
    ("data", "units", "loss"),
    [
        (lambda: digits(101), 10, "sparse_categorical_crossentropy"),
        (lambda: digits(101), 10, "crossentropy"),
        (lambda: one_hot_digits(101), 10, "categorical_crossentropy"),
        (odd_digits, 1, "crossentropy"),
    ],
)
def test_names_mean_what_compile_makes_of_them(tmp_path: pathlib.Path, data: Any, units: int, loss: str) -> None:
    keras.utils.set_random_seed(0)
    model = softmax_model(units)
    model.compile("adam", loss, metrics=["accuracy", "mse"] if loss == "categorical_crossentropy" else ["acc"])
    x, y = data()
    history = model.fit(x, y, 32, 1, shuffle=False, verbose=0).history
    names = [name for name in history if name != "loss"]
    trained = run(
        tmp_path,
        model=lambda: softmax_model(units),
        train_data=data,
        optimizer="adam",
        task=lambda: Supervised(loss=loss, metrics=names),
        global_batch_size=32,
        shuffle=False,
        seed=0,
        eval_data=None,
        epochs=1,
    )
    (point,) = trained.points("train")
    assert {name: point[name] for name in history} == pytest.approx({n: v[0] for n, v in history.items()}, rel=1e-5)
