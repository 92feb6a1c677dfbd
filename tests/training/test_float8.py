"""float8 layers train as under `fit` on one device, however a batch is cut.

tests/equivalence has float8 on every engine, test_resume.py resumes it, and tests/tasks/test_own_methods.py has a
variable of another kind that is overwritten.
"""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import pytest
from equivalence.cases import classification, digits, float8_model, sgd, sparse_loss, weighted_digits
from training.test_as_fit import agrees, fitted

from tfdist.errors import UserError
from tfdist.strategies.mirrored import Mirrored
from tfdist.tasks.supervised import Supervised
from tfdist.training.loop.learner import check_divisible
from tfdist.training.sharding.shards import Shards

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("xla", "parts"), [("off", (1, 3)), ("on", (1, 2))])
def test_as_fit(tmp_path: pathlib.Path, xla: str, parts: tuple[int, ...]) -> None:
    data = digits(101)
    theirs = fitted(float8_model, data, sgd(), epochs=8, loss=sparse_loss(), jit_compile=xla == "on")
    for num_parts in parts:
        cut = {"num_microbatches": num_parts, "xla": xla, "epochs": 8}
        agrees(tmp_path / str(num_parts), float8_model, data, sgd, classification, *theirs, **cut)


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
