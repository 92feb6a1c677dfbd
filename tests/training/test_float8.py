"""float8 layers train as under `fit` on one device, however a batch is cut.

tests/equivalence has float8 on every engine, tests/tasks/test_own_methods.py a variable of another kind that is
overwritten.
"""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from equivalence.cases import digits, float8_model, sparse_loss, weighted_digits
from equivalence.runs import assert_close
from training.trainings import Trained, run

from tfdist.errors import UserError
from tfdist.strategies.mirrored import Mirrored
from tfdist.tasks.supervised import Supervised
from tfdist.training.loop.learner import check_divisible
from tfdist.training.sharding.shards import Shards

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {
    "model": float8_model,
    "train_data": lambda: digits(101),
    "eval_data": None,
    "shuffle": False,
    "seed": 5,
    "epochs": 8,
}


def fitted(
    data: Any, model: Any, loss: keras.losses.Loss, rate: float = 0.2, epochs: int = 8, **settings: Any
) -> tuple[list[np.ndarray], list[float]]:
    """Weights and losses of Keras's `fit`, from the weights that `SETTINGS` begin with."""
    keras.utils.set_random_seed(SETTINGS["seed"])
    built = model()
    built.compile(keras.optimizers.SGD(rate), loss, **settings)
    weights = dict(enumerate(data)).get(2)
    history = built.fit(*data[:2], 64, epochs, shuffle=False, verbose=0, sample_weight=weights)
    return built.get_weights(), history.history["loss"]


def assert_as_fit(trained: Trained, weights: list[np.ndarray], losses: list[float]) -> None:
    assert [point["loss"] for point in trained.points("train")] == pytest.approx(losses, rel=3e-6)
    assert_close(trained.weights(), weights, tolerance=2e-6)


@pytest.mark.parametrize(
    "cut",
    [{}, {"num_microbatches": 2}, {"num_microbatches": 3}, {"xla": "on"}, {"xla": "on", "num_microbatches": 2}],
    ids=str,
)
def test_as_fit(tmp_path: pathlib.Path, cut: dict[str, Any]) -> None:
    expected = fitted(digits(101), float8_model, sparse_loss(), jit_compile="xla" in cut)
    assert_as_fit(run(tmp_path, **SETTINGS | cut), *expected)


@pytest.mark.parametrize("cut", [{"num_microbatches": 3}, {"deterministic": 4}], ids=str)
@pytest.mark.parametrize(("reduction", "rate"), [("mean_with_sample_weight", 0.2), ("sum", 0.003)])
def test_by_what_a_loss_divides(tmp_path: pathlib.Path, reduction: str, rate: float, cut: dict[str, Any]) -> None:
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

    data = tuple(each[:128] for each in weighted_digits())
    changes = {"model": model, "task": lambda: Supervised(loss=loss()), "train_data": lambda: data}
    changes["optimizer"] = lambda: keras.optimizers.SGD(rate)
    trained = run(tmp_path, **SETTINGS | cut | changes | {"epochs": 3})
    assert_as_fit(trained, *fitted(data, model, loss(), rate, epochs=3))


def test_a_resumed_run_gives_the_same_bits(tmp_path: pathlib.Path) -> None:
    settings = SETTINGS | {"num_microbatches": 2, "deterministic": True}
    run(tmp_path / "resumed", **settings | {"epochs": 3})
    assert run(tmp_path / "resumed", **settings).bits() == run(tmp_path / "whole", **settings).bits()


def test_what_combines_no_next_values_refuses_them() -> None:
    model = float8_model()
    check_divisible(model, num_parts=2)
    with pytest.raises(UserError, match=r"dense.*/inputs_scale, .*not in a model's own train_step"):
        check_divisible(model, num_parts=2, own_step=True)
    strategy = Mirrored(num_cpu_devices=1)
    strategy.connect()
    with pytest.raises(UserError, match=r"train.sharding = 'weights' .*inputs_scale.* Write train.sharding ="):
        Shards(strategy, model.trainable_variables, "weights")
