"""Numbers that follow a schedule: every step computes with the schedule's value, and afterwards they are as before."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training.trainings import run

from tfdist.errors import UserError
from tfdist.recipes import schedules
from tfdist.recipes.followed import Followed, Holders, followed
from tfdist.recipes.lengths import RunLength

RUN = RunLength(total_steps=10, steps_per_epoch=5, examples_per_epoch=160, global_batch_size=32)
START = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
GRADIENT = np.array([[0.3, 0.1], [-0.2, 0.4]], np.float32)
FALLING = [0.8 - 0.08 * t for t in range(10)]


def falling() -> schedules.Schedule:
    return schedules.PolynomialDecay(0.8, "1 of run", 0.0)


def steps_of(optimizer: keras.optimizers.Optimizer, name: str, count: int) -> np.ndarray:
    """A variable after so many steps with one gradient, while the optimizer's number follows `falling`."""
    variable = keras.Variable(START)
    optimizer.build([variable])
    with followed({name: falling()}, Holders([optimizer], keras.Sequential(), {}), RUN):
        apply = tf.function(lambda: optimizer.apply([tf.constant(GRADIENT)], [variable]), autograph=False)
        for _ in range(count):
            apply()
    return variable.numpy()


def test_weight_decay_follows() -> None:
    expected = START.copy()
    for t in range(5):
        expected = expected * (1 - 0.1 * FALLING[t]) - 0.1 * GRADIENT
    found = steps_of(keras.optimizers.SGD(0.1, weight_decay=0.5), "optimizer.weight_decay", 5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_momentum_follows() -> None:
    expected, velocity = START.copy(), 0.0
    for t in range(5):
        velocity = FALLING[t] * velocity - 0.1 * GRADIENT
        expected = expected + velocity
    found = steps_of(keras.optimizers.SGD(0.1, momentum=0.9), "optimizer.momentum", 5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_first_moment_of_adam_follows() -> None:
    expected, m, v = START.copy(), 0.0, 0.0
    for t in range(5):
        beta = FALLING[t]
        m = m + (GRADIENT - m) * (1 - beta)
        v = v + (GRADIENT**2 - v) * 0.001
        rate = 0.1 * np.sqrt(1 - 0.999 ** (t + 1)) / (1 - beta ** (t + 1))
        expected = expected - rate * m / (np.sqrt(v) + 1e-7)
    found = steps_of(keras.optimizers.Adam(0.1), "optimizer.beta_1", 5)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_dropout_follows_and_is_the_users_again(tmp_path: pathlib.Path) -> None:
    layer = keras.layers.Dropout(0.3, seed=1)
    model = keras.Sequential([keras.Input((1000,)), layer])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([])
    with followed({"layers.drop*.rate": falling()}, Holders([optimizer], model, {}), RUN):
        assert isinstance(layer.rate, Followed) and layer.get_config()["rate"] == 0.3
        model.save(tmp_path / "model.keras")
        assert type(keras.models.load_model(tmp_path / "model.keras").layers[0].rate) is float
        call = tf.function(lambda: model(tf.ones([50, 1000]), training=True), autograph=False)
        for t in (0, 5, 9):
            optimizer.iterations.assign(t)
            outputs = call().numpy()
            assert np.mean(outputs == 0) == pytest.approx(FALLING[t], abs=0.01)
            assert outputs.max() == pytest.approx(1 / (1 - FALLING[t]), rel=1e-4)
    assert type(layer.rate) is float and layer.rate == 0.3


def test_the_weight_of_a_loss_follows() -> None:
    weights, optimizer = {"a": 2.0, "b": 1.0}, keras.optimizers.SGD(0.1)
    optimizer.build([])
    with followed({"loss_weights.a": falling()}, Holders([optimizer], keras.Sequential(), weights), RUN):
        loss = tf.function(lambda: weights["a"] * tf.constant(3.0), autograph=False)
        optimizer.iterations.assign(4)
        assert float(loss()) == pytest.approx(3 * FALLING[4])
    assert weights == {"a": 2.0, "b": 1.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer.weight_decai", "Did you mean 'optimizer.weight_decay'"),
        ("optimizer.ema_momentum", "Here: optimizer.weight_decay."),
        ("layers.dropout.rat", "Here: layers.dropout.rate"),
        ("layers.off.rate", "Here: layers.dropout.rate"),
        ("layers.lstm*.rate", "train.follow names 'layers.lstm*.rate', which nothing here has"),
        ("loss_weights.a", "write 'optimizer.weight_decay'"),
        ("learning_rate", "write 'optimizer.weight_decay'"),
    ],
)
def test_a_name_of_nothing_is_one_message(name: str, message: str) -> None:
    off = keras.layers.Dropout(0.0, name="off")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.3, name="dropout"), off])
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.1)
    optimizer.build([])
    with (
        pytest.raises(UserError) as caught,
        followed({"layers.dropout.rate": falling(), name: falling()}, Holders([optimizer], model, {}), RUN),
    ):
        pass
    assert message in str(caught.value), str(caught.value)
    assert type(model.layers[0].rate) is float  # what was changed before is taken back


class Weights(keras.callbacks.Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[list[np.ndarray]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.after.append([np.array(w) for w in self.model.get_weights()])


@pytest.mark.slow
def test_equal_averaging_ends_with_the_mean_of_the_last_weights(tmp_path: pathlib.Path) -> None:
    seen = Weights()

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.2, use_ema=True)

    follow = {"optimizer.ema_momentum": schedules.EqualAverage("0.5 of run")}
    trained = run(tmp_path, optimizer=optimizer, epochs=4, follow=follow, callbacks=[seen])
    half = len(seen.after) // 2
    assert len(seen.after) == 28
    for i, average in enumerate(trained.weights()):
        mean = np.mean([weights[i] for weights in seen.after[half:]], axis=0)
        np.testing.assert_allclose(average, mean, rtol=1e-5, atol=1e-6)
        assert np.abs(average - seen.after[-1][i]).max() > 1e-4


@pytest.mark.slow
def test_a_killed_run_that_follows_ends_with_the_same_bits(tmp_path: pathlib.Path) -> None:
    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.AdamW(schedules.Warmup(schedules.CosineDecay(3e-3, "1 of run")), weight_decay=0.1)

    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "epochs": 4,
        "deterministic": True,
        "follow": {"optimizer.weight_decay": schedules.CosineDecay(0.1, "1 of run")},
    }
    whole = run(tmp_path / "whole", **settings)
    run(tmp_path / "cut", **settings, stop_after_epochs=2)
    assert run(tmp_path / "cut", **settings).bits() == whole.bits()
    plain = run(tmp_path / "plain", **(settings | {"follow": None}))
    assert plain.bits() != whole.bits()


def test_what_is_no_schedule_is_refused(tmp_path: pathlib.Path) -> None:
    failed = run(tmp_path, follow={"optimizer.weight_decay": 0.1}, may_fail=True)
    assert isinstance(failed.error, UserError) and "train.follow" in str(failed.error)


def test_arithmetic_gives_tensors() -> None:
    now: Callable[[], tf.Tensor] = lambda: tf.constant(0.25)  # noqa: E731
    number = Followed(0.9, now)
    for found, expected in ((1 - number, 0.75), (number * 2, 0.5), (-number, -0.25), (2**number, 2**0.25)):
        assert float(found) == pytest.approx(expected)
    assert number > 0.5 and float(number) == 0.9
