"""Beside a task a model's own steps are refused; keras_fit/test_own_steps.py trains them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from equivalence.cases import digits
from mistakes import each_is_refused
from training.trainings import run
from unequal_experiments import NextValue

from tfdist.errors import UserError
from tfdist.tasks.supervised import Supervised


class OwnLossAlone(keras.Sequential):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


class OwnStep(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(10)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        raise AssertionError("never called")


test_what_a_task_would_not_call_is_refused = each_is_refused(
    lambda model, loss, tmp_path: run(tmp_path, model=model, task=lambda: Supervised(loss=loss)),
    (OwnStep, "sparse_categorical_crossentropy", "OwnStep has a train_step of its own.*Leave train.task"),
    (
        lambda: OwnLossAlone([keras.layers.Dense(10)]),
        None,
        "OwnLossAlone has a compute_loss of its own.*Leave train.task",
    ),
    (lambda: keras.Sequential([keras.layers.Dense(10)]), None, "Supervised.loss is not given"),
)


def stateful() -> keras.Model:
    inputs = keras.Input(batch_shape=(64, 64))
    x = keras.layers.LSTM(4, stateful=True)(keras.layers.Reshape((8, 8))(inputs))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def overwriting() -> keras.Model:
    return keras.Sequential([keras.Input((64,)), NextValue(), keras.layers.Dense(10)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (stateful, r"The layer 'lstm.*' is stateful.*cut into 2 parts"),
        (overwriting, r"overwrite_with_gradient.: .*next_value.*/last\. .*into 2 parts"),
    ],
)
def test_what_a_batch_leaves_for_the_next_trains_on_one_device_and_is_refused_in_parts(
    tmp_path: pathlib.Path, model: Callable[[], keras.Model], message: str
) -> None:
    settings = {"model": model, "train_data": lambda: digits(192), "eval_data": None, "epochs": 1}
    assert np.isfinite(run(tmp_path / "one", **settings).result.train_metrics["loss"])
    trained = run(tmp_path / "two", may_fail=True, num_microbatches=2, **settings)
    with pytest.raises(UserError, match=message):
        raise trained.error
