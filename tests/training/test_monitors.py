"""A callback that watches what nobody reports is refused before the training."""

from __future__ import annotations

import keras
import pytest

from tfdist.errors import UserError
from tfdist.tasks.base import MetricSpec
from tfdist.tasks.supervised import Supervised
from tfdist.training.loop.best import check_monitors, reported_by
from tfdist.training.step.metrics import MetricGroup

callbacks = keras.callbacks


class AddsToTheLogs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = 1.0


def check(*given: keras.callbacks.Callback, evaluates: bool = True, learning_rate=0.1) -> None:
    metrics = MetricGroup([MetricSpec(keras.metrics.SparseCategoricalAccuracy, None)])
    task = Supervised(loss=keras.losses.SparseCategoricalCrossentropy())
    check_monitors(given, reported_by(metrics, task, evaluates=evaluates), keras.optimizers.SGD(learning_rate))


def test_monitors_that_are_reported_pass(tmp_path) -> None:
    check(callbacks.EarlyStopping(), callbacks.ReduceLROnPlateau(), callbacks.EarlyStopping("loss"))
    check(
        callbacks.ModelCheckpoint(tmp_path / "a.keras", monitor="val_sparse_categorical_accuracy", save_best_only=True)
    )
    check(callbacks.ModelCheckpoint(tmp_path / "a.keras", monitor="nothing"), evaluates=False)  # which watches nothing
    check(callbacks.EarlyStopping("sparse_categorical_accuracy"), evaluates=False)
    check(AddsToTheLogs(), callbacks.EarlyStopping("score"))


@pytest.mark.parametrize(
    "callback",
    [
        callbacks.EarlyStopping("val_los"),
        callbacks.ReduceLROnPlateau("val_los"),
        callbacks.ModelCheckpoint("a.keras", monitor="val_los", save_best_only=True),
    ],
)
def test_a_monitor_that_is_not_reported_is_refused_with_the_near_name(callback: keras.callbacks.Callback) -> None:
    with pytest.raises(UserError, match=f"{type(callback).__name__} monitors 'val_los'.*Did you mean 'val_loss'"):
        check(callback)


def test_what_is_added_to_the_logs_afterwards_is_not_reported_before() -> None:
    with pytest.raises(UserError, match="'score'"):
        check(callbacks.EarlyStopping("score"), AddsToTheLogs())


def test_a_monitor_of_an_evaluation_needs_one() -> None:
    with pytest.raises(UserError, match="nothing is evaluated"):
        check(callbacks.EarlyStopping(), evaluates=False)


@pytest.mark.slow
def test_two_that_set_the_learning_rate_are_refused() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    for callback in (callbacks.ReduceLROnPlateau(), callbacks.LearningRateScheduler(lambda epoch: 0.1)):
        check(callback)
        with pytest.raises(UserError, match=f"{type(callback).__name__} sets the learning rate"):
            check(callback, learning_rate=schedule)
