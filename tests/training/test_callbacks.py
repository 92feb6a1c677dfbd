"""Keras's own callbacks and a user's do in our loop what they do in Keras's."""

from __future__ import annotations

import dataclasses
import pathlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from equivalence.cases import (
    digits,
    ema_sgd,
    own_methods_model,
    sparse_loss,
    two_output_model,
    two_output_task,
    two_outputs,
)
from keras_fit.spies import BatchSpy, Spy
from training.trainings import STEPS_PER_EPOCH, run

from tfdist.errors import DivergedError, UserError
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.training.loop.callbacks import (
    TEST_BATCH_HOOKS,
    TRAIN_BATCH_HOOKS,
    Callbacks,
    acting,
    check_callbacks,
    writes,
)


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [None, 3])
def test_batch_hooks_come_for_each_batch_and_one_line_says_that_calls_are_short(
    tmp_path: pathlib.Path, steps_per_call: int | None
) -> None:
    spy = BatchSpy()
    trained = run(tmp_path, epochs=2, callbacks=[spy], steps_per_call=steps_per_call)
    (event,) = trained.events("calls_of_one_step")
    assert event["details"]["callbacks"] == ["BatchSpy"]
    for part, split, num_batches in (("train", "train", STEPS_PER_EPOCH), ("test", "eval", 2)):
        hooks = [pair for i in range(num_batches) for pair in ((f"{part}_batch_begin", i), (f"{part}_batch_end", i))]
        calls = [call for call in spy.calls if call[0].startswith(f"{part}_batch")]
        assert [call[:2] for call in calls] == hooks * 2
        last = [call[2]["loss"] for call in calls if call[:2] == hooks[-1]]
        assert last == [p["loss"] for p in trained.points(split)]


@pytest.mark.slow
def test_what_a_batch_hook_assigns_acts_on_the_next_batch(tmp_path: pathlib.Path) -> None:
    class Freezes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                self.model.optimizer.learning_rate = 0.0

    trained = run(tmp_path / "frozen", epochs=1, callbacks=[Freezes()], eval_data=None)
    assert trained.bits() == run(tmp_path / "short", epochs=None, steps=3, eval_data=None).bits()


def test_callbacks_of_keras_that_do_nothing_in_a_batch_hook_shorten_no_call(tmp_path: pathlib.Path) -> None:
    idle = [
        keras.callbacks.ModelCheckpoint("x.keras"),
        keras.callbacks.TensorBoard("x"),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.EarlyStopping(),
        keras.callbacks.CSVLogger("x.csv"),
        keras.callbacks.LambdaCallback(on_epoch_end=print),
    ]
    assert acting(idle, TRAIN_BATCH_HOOKS) == acting(idle, TEST_BATCH_HOOKS) == []
    busy = [
        keras.callbacks.ModelCheckpoint("x.keras", save_freq=10),
        keras.callbacks.TensorBoard("x", update_freq="batch"),
        keras.callbacks.TensorBoard("x", write_steps_per_second=True),
        keras.callbacks.LambdaCallback(on_train_batch_end=print),
        StopsInTheMiddle(),
    ]
    for callback in busy:
        assert acting([callback], TRAIN_BATCH_HOOKS) == [type(callback).__name__]
    profiling = keras.callbacks.TensorBoard("x")
    profiling._should_trace = True  # as profile_batch makes it, which starts a profiler at once
    assert acting([profiling], TRAIN_BATCH_HOOKS) == ["TensorBoard"]
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
def test_early_stopping_puts_back_the_best_weights_and_they_are_what_is_evaluated(tmp_path: pathlib.Path) -> None:
    stopping = keras.callbacks.EarlyStopping(patience=1, min_delta=100.0, restore_best_weights=True)
    trained = run(tmp_path / "stopped", epochs=9, callbacks=[stopping])
    assert trained.result.epochs == 2
    (finished,) = trained.events("run_finished")
    assert finished["details"]["stopped_early"]
    first = run(tmp_path / "first", epochs=1)
    assert trained.bits() == first.bits()
    assert trained.result.eval_metrics == pytest.approx(first.result.eval_metrics)
    assert trained.points("eval")[-1]["loss"] != trained.result.eval_metrics["loss"]
    model = trained.exported()
    model.compile(loss=sparse_loss(), metrics=[keras.metrics.SparseCategoricalAccuracy()])
    assert model.evaluate(*digits(101), verbose=0, return_dict=True) == pytest.approx(
        trained.result.eval_metrics, abs=1e-6
    )


@pytest.mark.slow
def test_the_best_weights_that_are_put_back_stay_before_the_averages(tmp_path: pathlib.Path) -> None:
    stopping = keras.callbacks.EarlyStopping(patience=1, min_delta=100.0, restore_best_weights=True)
    trained = run(tmp_path / "stopped", epochs=9, optimizer=ema_sgd, callbacks=[stopping])
    kept: list[Any] = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(model_of(keep).get_weights()))
    run(tmp_path / "first", epochs=1, optimizer=ema_sgd, callbacks=[keep])
    for ours, theirs in zip(trained.exported().get_weights(), kept[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert trained.result.eval_metrics["loss"] == pytest.approx(trained.points("eval")[0]["loss"], abs=1e-6)


def model_of(callback: keras.callbacks.Callback) -> keras.Model:
    return callback.model


@pytest.mark.slow
def test_a_plateau_lowers_the_rate_that_is_logged_and_used(tmp_path: pathlib.Path) -> None:
    plateau = keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=100.0, factor=0.0, min_lr=0.0)
    trained = run(tmp_path, epochs=4, callbacks=[plateau])
    assert [p["learning_rate"] for p in trained.points("train")] == pytest.approx([0.2, 0.2, 0.0, 0.0])
    assert trained.points("eval")[1]["loss"] == trained.points("eval")[3]["loss"]  # nothing is learned at a rate of 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        keras.optimizers.schedules.PiecewiseConstantDecay([7, 14], [0.3, 0.2, 0.1]),
        keras.optimizers.schedules.CosineDecay(0.2, 21, warmup_target=0.4, warmup_steps=5),
    ],
)
def test_a_schedule_is_logged_at_the_optimizers_step(tmp_path: pathlib.Path, schedule: Any) -> None:
    trained = run(tmp_path, epochs=3, optimizer=lambda: keras.optimizers.SGD(schedule))
    expected = [float(schedule(step)) for step in (7, 14, 21)]
    assert [p["learning_rate"] for p in trained.points("train")] == pytest.approx(expected)


@pytest.mark.slow
def test_a_callback_evaluates_a_model_of_several_named_outputs(tmp_path: pathlib.Path) -> None:
    data, seen = two_outputs()[:2], []

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found = self.model.evaluate(*data, batch_size=64, verbose=0, return_dict=True)
            seen.append((found, {name: logs[f"val_{name}"] for name in found}))

    parts = {
        "model": two_output_model,
        "task": two_output_task,
        "train_data": lambda: data,
        "eval_data": lambda: data,
    }
    run(tmp_path, epochs=1, callbacks=[Evaluates()], **parts)
    ((found, expected),) = seen
    assert set(found) >= {"loss", "digit_sparse_categorical_accuracy", "odd_auc"}
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_loss_of_the_models_own_is_trained_with_callbacks_as_without(tmp_path: pathlib.Path) -> None:
    own = {"model": own_methods_model, "task": lambda: Supervised(loss=sparse_loss()), "epochs": 1}
    with_one = run(tmp_path / "with", callbacks=[keras.callbacks.History()], **own)
    without = run(tmp_path / "without", **own)
    assert with_one.points("train") == without.points("train") and with_one.points("train")[-1]["loss"] > 1
    assert with_one.bits() == without.bits()


@pytest.mark.slow
def test_history_terminate_on_nan_and_swapped_averages_work(tmp_path: pathlib.Path) -> None:
    history = keras.callbacks.History()
    callbacks = [history, keras.callbacks.TerminateOnNaN(), keras.callbacks.SwapEMAWeights()]
    trained = run(tmp_path / "run", optimizer=ema_sgd, callbacks=callbacks)
    assert history.history["val_loss"] == [p["loss"] for p in trained.points("eval")]
    # With the averages swapped in, the last evaluation is that of what is exported.
    assert trained.points("eval")[-1]["loss"] == pytest.approx(trained.result.eval_metrics["loss"], abs=1e-6)


class StopsItself(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == 1


@pytest.mark.slow
def test_a_users_callback_stops_the_training_and_the_next_one_starts_afresh(tmp_path: pathlib.Path) -> None:
    for name in ("one", "two"):
        assert run(tmp_path / name, epochs=5, callbacks=[StopsItself()]).result.epochs == 2


class StopsInTheMiddle(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = self.model.optimizer.iterations >= 9


@pytest.mark.slow
def test_a_batch_hook_stops_the_training_within_a_call_and_ends_the_epoch_there(tmp_path: pathlib.Path) -> None:
    epochs = Spy()
    trained = run(tmp_path, epochs=5, callbacks=[StopsInTheMiddle(), epochs])
    assert trained.result.steps == 9 and trained.result.epochs == 1
    assert [point["step"] for point in trained.points("eval")] == [7, 9]
    assert [point["step"] for point in trained.points("train")] == [7, 9]
    assert [call[0] for call in epochs.calls].count("epoch_end") == 2


@pytest.mark.slow
def test_the_end_of_a_training_copies_no_model(tmp_path: pathlib.Path) -> None:
    model = keras.Sequential([keras.Input((1000,)), *(keras.layers.Dense(1000) for _ in range(8))])  # 32 MB
    strategy = OneDevice()
    strategy.connect()
    parts = {"optimizer": keras.optimizers.SGD(), "strategy": strategy, "params": {}}
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


def test_only_the_chief_runs_what_writes(tmp_path: pathlib.Path) -> None:
    def hooks(callback: keras.callbacks.Callback, *, is_chief: bool) -> list[tuple[Any, ...]]:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        strategy = OneDevice()
        strategy.connect()
        if not is_chief:  # as on the second of two, without the first
            strategy._topology = dataclasses.replace(strategy.topology, worker_index=1)
        parts = {
            "model": model,
            "optimizer": keras.optimizers.SGD(),
            "strategy": strategy,
            "params": {"epochs": 1, "steps": 1},
        }
        callbacks = Callbacks([callback], **parts)
        callbacks.train_begin()
        return callback.calls

    everywhere, by_chief = Spy(), Spy()
    by_chief.chief_only = True
    assert hooks(everywhere, is_chief=False) == [("train_begin", 1, 1, {})]
    assert hooks(by_chief, is_chief=False) == []
    assert hooks(by_chief, is_chief=True) == [("train_begin", 1, 1, {})]
    assert writes(keras.callbacks.ModelCheckpoint("x.keras")) and writes(keras.callbacks.TensorBoard("x"))
    assert not writes(keras.callbacks.EarlyStopping())
    shared = keras.callbacks.ModelCheckpoint("x.keras")
    shared.chief_only = False
    assert not writes(shared)


@pytest.mark.slow
def test_callbacks_read_save_and_put_back_weights_on_two_replicas(
    tmp_path: pathlib.Path, mirrored: Callable[[str], Any]
) -> None:
    found = mirrored("callbacks")
    assert found["epochs"] == 2 and len(found["sums"]) == 2
    assert found["saved"] == found["sums"][:1]
    assert found["best"] == found["restored"] == found["exported"]
    assert found["eval"]["loss"] == pytest.approx(found["evaluated"][0], abs=1e-6)
    assert found["copies"][0::2] == found["copies"][1::2]  # put back on both replicas
    expected = run(tmp_path, epochs=1).weights()
    for ours, theirs in zip(found["restored"], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (keras.callbacks.EarlyStopping(), "write a list"),
        ([keras.callbacks.EarlyStopping], r"write @keras\.callbacks\.EarlyStopping\(\) with parentheses"),
        (["EarlyStopping"], "'EarlyStopping', which is no"),
        ([keras.callbacks.CSVLogger("gs://bucket/log.csv")], "metrics.jsonl of the run has the same numbers"),
    ],
)
def test_what_cannot_work_gives_a_message(callbacks: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_callbacks(callbacks)
