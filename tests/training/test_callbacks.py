"""Keras's own callbacks and a user's do in our loop what they do in Keras's."""

from __future__ import annotations

import pathlib
import tracemalloc
from typing import Any

import keras
import numpy as np
import pytest
from keras_fit.spies import BatchSpy, Spy
from mistakes import each_is_refused
from training.trainings import run

from tfdist.errors import DivergedError
from tfdist.strategies.one_device import OneDevice
from tfdist.training.loop.callbacks import (
    TEST_BATCH_HOOKS,
    TRAIN_BATCH_HOOKS,
    Callbacks,
    check_callbacks,
    list_active_callbacks,
)


def test_one_line_names_the_callbacks_that_make_calls_short(tmp_path: pathlib.Path) -> None:
    (event,) = run(tmp_path, epochs=1, callbacks=[BatchSpy()], steps_per_call=3).events("calls_of_one_step")
    assert event["details"]["callbacks"] == ["BatchSpy"]


def test_callbacks_of_keras_that_do_nothing_in_a_batch_hook_shorten_no_call(tmp_path: pathlib.Path) -> None:
    idle = [
        keras.callbacks.ModelCheckpoint("x.keras"),
        keras.callbacks.TensorBoard("x"),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.EarlyStopping(),
        keras.callbacks.CSVLogger("x.csv"),
        keras.callbacks.LambdaCallback(on_epoch_end=print),
    ]
    assert list_active_callbacks(idle, TRAIN_BATCH_HOOKS) == list_active_callbacks(idle, TEST_BATCH_HOOKS) == []
    busy = [
        keras.callbacks.ModelCheckpoint("x.keras", save_freq=10),
        keras.callbacks.TensorBoard("x", update_freq="batch"),
        keras.callbacks.TensorBoard("x", write_steps_per_second=True),
        keras.callbacks.LambdaCallback(on_train_batch_end=print),
        StopsInTheMiddle(),
    ]
    for callback in busy:
        assert list_active_callbacks([callback], TRAIN_BATCH_HOOKS) == [type(callback).__name__]
    profiling = keras.callbacks.TensorBoard("x")
    profiling._should_trace = True  # as profile_batch makes it, which starts a profiler at once
    assert list_active_callbacks([profiling], TRAIN_BATCH_HOOKS) == ["TensorBoard"]
    assert keras.callbacks.TensorBoard("x")._should_trace is False


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_train_begin"])
def test_a_stop_asked_for_before_the_first_batch_ends_the_training_after_it(tmp_path: pathlib.Path, hook: str) -> None:
    class Stops(keras.callbacks.Callback):
        pass

    setattr(Stops, hook, lambda self, *_: setattr(self.model, "stop_training", True))
    assert run(tmp_path, epochs=5, steps_per_call=3, callbacks=[Stops()]).result.steps == 1


class Spoils(keras.callbacks.Callback):
    """Makes the first loss of an epoch not a number."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch:
            self.model.weights[0].assign(np.full((64, 32), np.nan, np.float32))


@pytest.mark.slow
def test_terminate_on_nan_ends_the_training_as_fit_does_and_what_is_put_back_is_kept(tmp_path: pathlib.Path) -> None:
    recorder = Spy()
    best = keras.callbacks.EarlyStopping(restore_best_weights=True, patience=9)
    trained = run(
        tmp_path / "spoilt",
        epochs=5,
        steps_per_call=7,
        callbacks=[Spoils(2), keras.callbacks.TerminateOnNaN(), best, recorder],
    )
    assert trained.result.steps == 15
    assert [call[0] for call in recorder.calls].count("epoch_end") == 3 and recorder.calls[-1][0] == "train_end"
    assert trained.bits() == run(tmp_path / "whole", epochs=2).bits()
    assert trained.result.eval_metrics["loss"] == trained.points("eval")[1]["loss"]


@pytest.mark.slow
def test_what_nobody_puts_back_has_diverged_once_all_callbacks_were_told(tmp_path: pathlib.Path) -> None:
    for name, deterministic in (("quick", False), ("careful", True)):
        recorder = Spy()
        trained = run(
            tmp_path / name,
            may_fail=True,
            deterministic=deterministic,
            callbacks=[Spoils(0), keras.callbacks.TerminateOnNaN(), recorder],
        )
        assert isinstance(trained.error, DivergedError) and "step 1" in str(trained.error)
        assert [call[0] for call in recorder.calls][-2:] == ["epoch_end", "train_end"]
        assert not list((tmp_path / name / "checkpoints").glob("*/manifest.json"))
    raising = [Spoils(0), keras.callbacks.TerminateOnNaN(raise_error=True)]
    trained = run(tmp_path / "raises", may_fail=True, callbacks=raising)
    assert isinstance(trained.error, DivergedError)


@pytest.mark.slow
def test_a_schedule_is_logged_at_the_optimizers_step(tmp_path: pathlib.Path) -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.2, 21, warmup_target=0.4, warmup_steps=5)
    trained = run(tmp_path, epochs=3, optimizer=lambda: keras.optimizers.SGD(schedule))
    expected = [float(schedule(step)) for step in (7, 14, 21)]
    assert [p["learning_rate"] for p in trained.points("train")] == pytest.approx(expected)


class StopsInTheMiddle(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = self.model.optimizer.iterations >= 9


@pytest.mark.slow
def test_the_end_of_a_training_copies_no_model(tmp_path: pathlib.Path) -> None:
    model = keras.Sequential([keras.Input((1000,)), *(keras.layers.Dense(1000) for _ in range(8))])  # 32 MB
    strategy = OneDevice()
    strategy.connect()
    parts = {"optimizer": keras.optimizers.SGD(), "strategy": strategy, "params": {"epochs": 1}}
    changes = keras.callbacks.LambdaCallback(on_train_end=lambda logs: model.layers[3].bias.assign(np.ones(1000)))
    for callback, changed in ((keras.callbacks.EarlyStopping("loss"), False), (changes, True)):
        callbacks = Callbacks([callback], model=model, **parts)
        callbacks.train_begin()
        tracemalloc.start()
        try:
            assert callbacks.train_end({}) == changed
            assert tracemalloc.get_traced_memory()[1] < 12_000_000
        finally:
            tracemalloc.stop()


test_what_cannot_work_gives_a_message = each_is_refused(
    lambda callbacks: check_callbacks(callbacks),
    (keras.callbacks.EarlyStopping(), "write a list"),
    ([keras.callbacks.EarlyStopping], r"write @keras\.callbacks\.EarlyStopping\(\) with parentheses"),
    ([Spoils], rf"write @{__name__}\.Spoils\(\) with parentheses"),
    (["EarlyStopping"], "'EarlyStopping', which is no"),
    ([keras.callbacks.CSVLogger("gs://bucket/log.csv")], "metrics.jsonl of the run has the same numbers"),
)
