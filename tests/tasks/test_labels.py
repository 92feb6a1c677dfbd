"""Labels that are no class are found before training where the examples lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.tasks.losses import as_loss, compute_losses
from tfdist.tasks.supervised import Supervised


def model(num_classes: int) -> keras.Model:
    inputs = keras.Input([4])
    return keras.Model(inputs, keras.layers.Dense(num_classes)(inputs))


def sequential(num_classes: int) -> keras.Model:
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(num_classes)])


def task(**settings: int) -> Supervised:
    return Supervised(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings))


SPARSE = ["sparse_categorical_crossentropy", keras.losses.sparse_categorical_crossentropy]
ONE_HOT = ["categorical_crossentropy", keras.losses.categorical_crossentropy, keras.losses.CategoricalCrossentropy()]


@pytest.mark.parametrize("built", [model, sequential])
@pytest.mark.parametrize("wrong", [-1, 3])
@pytest.mark.parametrize("loss", [*SPARSE, keras.losses.SparseCategoricalCrossentropy(from_logits=True)])
def test_the_first_label_out_of_range_is_named(loss: Any, wrong: int, built: Callable[[int], keras.Model]) -> None:
    labels = np.array([0, 2, wrong, wrong, 1])
    with pytest.raises(UserError, match=rf"Example 2 of the training data has the label {wrong}, .*0 … 2\. 2 labels"):
        Supervised(loss=loss).check_examples(built(3), (np.zeros([5, 4]), labels), "training")


def test_labels_that_are_classes_or_ignored_pass() -> None:
    task().check_examples(model(3), (np.zeros([3, 4]), np.array([[0], [2], [1]])), "training")
    task(ignore_class=-1).check_examples(model(3), (np.zeros([2, 4]), np.array([2, -1])), "training")


def test_other_losses_take_any_target() -> None:
    regression = Supervised(loss=keras.losses.MeanSquaredError())
    regression.check_examples(model(1), (np.zeros([2, 4]), np.array([-5.0, 9.0])), "training")


@pytest.mark.slow
def test_the_output_with_the_wrong_label_is_named() -> None:
    inputs = keras.Input([4])
    outputs = {name: keras.layers.Dense(2, name=name)(inputs) for name in ("left", "right")}
    losses = {name: keras.losses.SparseCategoricalCrossentropy(from_logits=True) for name in outputs}
    targets = {"left": np.array([0, 1]), "right": np.array([0, 2])}
    with pytest.raises(UserError, match="Example 1 of the evaluation data, output 'right', has the label 2"):
        Supervised(loss=losses).check_examples(keras.Model(inputs, outputs), (np.zeros([2, 4]), targets), "evaluation")


def losses_of(loss: Any, targets: list[int], outputs: list[int]) -> list[int | None]:
    values, _ = compute_losses(as_loss(loss, "the model"), tf.zeros(targets), tf.ones(outputs), None)
    return list(values.shape)


@pytest.mark.parametrize("loss", [*SPARSE, keras.losses.SparseCategoricalCrossentropy()])
def test_one_hot_targets_of_a_loss_of_class_numbers_name_the_loss_for_them(loss: Any) -> None:
    with pytest.raises(UserError, match=r"one-hot, 3 numbers an example.*Write 'categorical_crossentropy'"):
        losses_of(loss, [5, 3], [5, 3])
    for targets, outputs in (([5], [5, 3]), ([5, 1], [5, 3]), ([5, 4], [5, 4, 3])):
        assert losses_of(loss, targets, outputs) == outputs[:-1]


@pytest.mark.parametrize("loss", ONE_HOT)
def test_class_numbers_of_a_loss_of_one_hot_targets_name_the_loss_for_them(loss: Any) -> None:
    for targets in ([5], [5, 1]):
        with pytest.raises(UserError, match=r"class numbers.*Write 'sparse_categorical_crossentropy'"):
            losses_of(loss, targets, [5, 3])
    assert losses_of(loss, [5, 3], [5, 3]) == [5]
