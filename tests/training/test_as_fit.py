"""A loss's own reduction and an optimizer's own settings train and log what Keras's `fit` on one device does.

The last batch of an epoch is partial. tests/equivalence holds the same for the other strategies, and has float8 on
every engine; test_resume.py resumes float8, and tests/tasks/test_supervised.py has a variable
that is overwritten.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from equivalence.cases import (
    classification,
    classification_by,
    constrained_model,
    dense_model,
    digits,
    float8_model,
    overwriting_sgd,
    sgd,
    sparse_loss,
    tagged_words,
    tagging_model,
    two_optimizers,
    weighted_digits,
)
from equivalence.runs import assert_close
from training.trainings import run

from tfdist.errors import UserError
from tfdist.strategies.mirrored import Mirrored
from tfdist.tasks.supervised import Supervised
from tfdist.training.loop.learner import check_divisible
from tfdist.training.sharding.shards import Shards

pytestmark = pytest.mark.slow

BATCH, EPOCHS, SEED = 64, 2, 5


def fitted(
    build: Callable[[], keras.Model], data: Any, optimizer: Any, epochs: int = EPOCHS, **settings: Any
) -> tuple[list[Any], Any]:
    """Weights and history of `fit` from the weights that a run with this seed begins with."""
    keras.utils.set_random_seed(SEED)
    model = build()
    model.compile(optimizer=optimizer, **settings)
    weights = dict(enumerate(data)).get(2)
    history = model.fit(*data[:2], BATCH, epochs, shuffle=False, verbose=0, sample_weight=weights)
    return model.get_weights(), history.history


def agrees(
    directory: pathlib.Path,
    model: Any,
    data: Any,
    optimizer: Any,
    task: Any,
    weights: Any,
    logs: Any,
    **changes: Any,
) -> None:
    settings = {"shuffle": False, "seed": SEED, "eval_data": None, "epochs": EPOCHS, "global_batch_size": BATCH}
    settings |= {"model": model, "train_data": lambda: data, "optimizer": optimizer, "task": task}
    trained = run(directory, **settings | changes)
    assert_close(trained.weights(), weights, tolerance=2e-6)
    for name in [n for n in logs if not n.endswith("_loss")]:  # of which fit counts a short batch as a whole one
        values = logs[name]
        assert [p[name] for p in trained.points("train")] == pytest.approx(values, rel=3e-6)


def cut(data: Any, num: int = 101) -> Any:
    return tf.nest.map_structure(lambda a: a[:num], data)


@pytest.mark.parametrize(
    ("reduction", "rate"),
    [("sum_over_batch_size", 0.1), ("sum", 0.002), ("mean_with_sample_weight", 0.1), ("none", 0.002)],
)
def test_sample_weights_under_each_reduction(tmp_path: pathlib.Path, reduction: str, rate: float) -> None:
    def loss() -> keras.losses.Loss:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(rate, momentum=0.9)

    data = cut(weighted_digits())
    theirs = fitted(dense_model, data, optimizer(), loss=loss())
    agrees(tmp_path, dense_model, data, optimizer, lambda: Supervised(loss=loss()), *theirs)


def test_masks_and_ignored_classes_beside_another_output(tmp_path: pathlib.Path) -> None:
    def loss() -> Any:
        tags = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        return {"tags": tags, "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")}

    coefficients = {"tags": 1.0, "digit": 0.02}
    data = cut(tagged_words())
    theirs = fitted(tagging_model, data, keras.optimizers.SGD(0.2), loss=loss(), loss_weights=coefficients)
    task = Supervised(loss=loss(), loss_weights=coefficients)
    agrees(tmp_path, tagging_model, data, lambda: keras.optimizers.SGD(0.2), lambda: task, *theirs)


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        (overwriting_sgd, constrained_model),
        (two_optimizers, dense_model),
        (lambda: keras.optimizers.SGD(0.2, loss_scale_factor=100.0, clipvalue=0.01), dense_model),
    ],
    ids=["ema_overwriting", "two_optimizers", "loss_scale_factor"],
)
def test_settings_of_the_optimizer(tmp_path: pathlib.Path, optimizer: Any, model: Any) -> None:
    data = digits(300)
    theirs = fitted(model, data, optimizer(), loss=sparse_loss())
    agrees(tmp_path, model, data, optimizer, classification_by("sum_over_batch_size"), *theirs)


# float8


@pytest.mark.parametrize(("xla", "parts"), [("off", (1, 3)), ("on", (1, 2))])
def test_float8_layers_train_as_under_fit(tmp_path: pathlib.Path, xla: str, parts: tuple[int, ...]) -> None:
    data = digits(101)
    theirs = fitted(float8_model, data, sgd(), epochs=8, loss=sparse_loss(), jit_compile=xla == "on")
    for num_parts in parts:
        cut = {"num_microbatches": num_parts, "xla": xla, "epochs": 8}
        agrees(tmp_path / str(num_parts), float8_model, data, sgd, classification, *theirs, **cut)


@pytest.mark.parametrize("cut", [{"num_microbatches": 3}, {"deterministic": 4}], ids=str)
@pytest.mark.parametrize(("reduction", "rate"), [("mean_with_sample_weight", 0.2), ("sum", 0.003)])
def test_float8_by_what_a_loss_divides(
    tmp_path: pathlib.Path, reduction: str, rate: float, cut: dict[str, Any]
) -> None:
    """What flows back has the size that it has under `fit`; beside it are a penalty and statistics of the batch."""

    def model() -> keras.Model:
        inputs = keras.Input((64,))
        x = keras.layers.Dense(16, "tanh", kernel_regularizer="l2", use_bias=False)(inputs)
        x = keras.layers.BatchNormalization()(x) if "deterministic" in cut else x
        made = keras.Model(inputs, keras.layers.Dense(10, use_bias=False)(x))
        made.quantize("float8")
        return made

    def loss() -> keras.losses.Loss:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(rate)

    data = tuple(each[:128] for each in weighted_digits())
    theirs = fitted(model, data, optimizer(), epochs=3, loss=loss())
    agrees(tmp_path, model, data, optimizer, lambda: Supervised(loss=loss()), *theirs, **cut | {"epochs": 3})


def test_what_combines_no_next_values_refuses_them() -> None:
    model = float8_model()
    check_divisible(model, num_parts=2)
    with pytest.raises(UserError, match=r"dense.*/inputs_scale, .*not in a model's own train_step"):
        check_divisible(model, num_parts=2, own_step=True)
    strategy = Mirrored(num_cpu_devices=1)
    strategy.connect()
    with pytest.raises(UserError, match=r"train.sharding = 'weights' .*inputs_scale.* Write train.sharding ="):
        Shards(strategy, model.trainable_variables, "weights")
