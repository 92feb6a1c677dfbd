"""A callback that watches what nobody reports is refused before the training."""

from __future__ import annotations

import keras
import pytest

from tfdist.errors import UserError
from tfdist.tasks.supervised import Supervised
from tfdist.tasks.task import MetricSpec
from tfdist.training.loop.best import check_monitors, reported_by
from tfdist.training.step.metrics import MetricGroup

callbacks = keras.callbacks


class AddsToTheLogs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = 1.0


def check(*given: keras.callbacks.Callback, evaluates: bool = True, learning_rate=0.1) -> None:
    metrics = MetricGroup([MetricSpec(keras.metrics.SparseCategoricalAccuracy, None)])
    task = Supervised(loss=keras.losses.SparseCategoricalCrossentropy())
    check_monitors(
        given, reported_by(metrics, task, sets=[""] if evaluates else []), keras.optimizers.SGD(learning_rate)
    )


def best_file(monitor: str) -> keras.callbacks.Callback:
    return callbacks.ModelCheckpoint("a.keras", monitor=monitor, save_best_only=True)


@pytest.mark.parametrize(
    ("given", "evaluates"),
    [
        ([callbacks.EarlyStopping(), callbacks.ReduceLROnPlateau(), callbacks.EarlyStopping("loss")], True),
        ([best_file("val_sparse_categorical_accuracy")], True),
        ([callbacks.ModelCheckpoint("a.keras", monitor="nothing")], False),  # which watches nothing
        ([callbacks.EarlyStopping("sparse_categorical_accuracy")], False),
        ([AddsToTheLogs(), callbacks.EarlyStopping("score")], True),
    ],
)
def test_monitors_that_are_reported_pass(given: list[keras.callbacks.Callback], evaluates: bool) -> None:
    check(*given, evaluates=evaluates)


@pytest.mark.parametrize(
    ("given", "evaluates", "words"),
    [
        ([callbacks.EarlyStopping("val_los")], True, "EarlyStopping monitors 'val_los'.*Did you mean 'val_loss'"),
        ([callbacks.ReduceLROnPlateau("val_los")], True, "ReduceLROnPlateau monitors 'val_los'"),
        ([best_file("val_los")], True, "ModelCheckpoint monitors 'val_los'"),
        ([callbacks.EarlyStopping("score"), AddsToTheLogs()], True, "'score'"),  # which is added afterwards
        ([callbacks.EarlyStopping()], False, "nothing is evaluated"),
    ],
)
def test_a_monitor_that_is_not_reported_is_refused(
    given: list[keras.callbacks.Callback], evaluates: bool, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check(*given, evaluates=evaluates)


@pytest.mark.slow
def test_two_that_set_the_learning_rate_are_refused() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    for callback in (callbacks.ReduceLROnPlateau(), callbacks.LearningRateScheduler(lambda epoch: 0.1)):
        check(callback)
        with pytest.raises(UserError, match=f"{type(callback).__name__} sets the learning rate"):
            check(callback, learning_rate=schedule)
