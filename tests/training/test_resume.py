"""A run that ended before its time continues where it was, and ends as if nothing had happened.

Here it ends by an exception or a signal that a callback causes in this process; tests/crashes kills processes.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import re
import signal
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from equivalence.cases import digits, ema_sgd, float8_model, named_model, one_hot_digits
from equivalence.runs import assert_same_bits
from metadata_support import MetadataServer
from mistakes import each_is_refused
from support import wait_until
from training.trainings import STEPS_PER_EPOCH, Trained, run

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.write import manager
from tfdist.errors import EXIT_USER_ERROR, PreemptedError, UserError
from tfdist.tasks.supervised import Supervised

pytestmark = pytest.mark.slow

EACH_STEP = CheckpointPolicy(every_steps=1)


def stateful_model(classes: int = 10, units: int = 16) -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.BatchNormalization(momentum=0.9)(keras.layers.Dense(units, name="body")(inputs))
    x = keras.layers.Dropout(0.3)(keras.layers.Activation("tanh")(x))
    return keras.Model(inputs, keras.layers.Dense(classes, name="head")(x))


def memories() -> list[keras.callbacks.Callback]:
    """Callbacks that remember; the rate goes down in the second epoch."""
    return [
        keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=10.0, factor=0.5, cooldown=1),
        keras.callbacks.EarlyStopping(patience=5, min_delta=0.01, restore_best_weights=True),
    ]


BASE: dict[str, Any] = {
    "model": stateful_model,
    "optimizer": lambda: keras.optimizers.Adam(3e-3, global_clipnorm=1.0),
    "train_data": lambda: digits(447),  # the last of the seven batches is smaller
    "epochs": 4,
    "log_every_steps": 3,
    "steps_per_call": 2,
    "checkpoint": EACH_STEP,
}


class Once(keras.callbacks.Callback):
    """Does something at the n-th call of a hook, counted from 1 in this start, and never again."""

    def __init__(self, hook: str, number: int, act: Callable[[], None]) -> None:
        super().__init__()
        calls = itertools.count(1)  # an attribute would come back from a checkpoint

        def count(*_: Any, **__: Any) -> None:
            if next(calls) == number:
                act()

        setattr(self, hook, count)


def fail() -> None:
    raise RuntimeError("as if killed")


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def interrupted(directory: pathlib.Path, *ends: Once, **changes: Any) -> Trained:
    """A run that ends before its time once for each of `ends`, and the one that resumes from there to the end."""
    settings = BASE | changes
    for end in ends:
        ended = run(directory, may_fail=True, callbacks=[*memories(), end], **settings)
        assert ended.error is not None, "it was not interrupted"
    return run(directory, callbacks=memories(), **settings)


def assert_same(ours: Trained, theirs: Trained) -> None:
    assert ours.bits() == theirs.bits()
    assert ours.result.train_metrics == theirs.result.train_metrics
    assert ours.result.eval_metrics == theirs.result.eval_metrics
    assert (ours.result.steps, ours.result.examples_seen) == (theirs.result.steps, theirs.result.examples_seen)
    for split in ("train", "eval"):
        assert ours.points(split) == theirs.points(split)


def test_a_run_that_is_interrupted_again_and_again_ends_as_if_it_was_not(
    tmp_path: pathlib.Path, undisturbed: Trained
) -> None:
    ends = [
        Once("on_train_batch_end", 3, fail),  # within an epoch
        Once("on_train_batch_end", 5, fail),  # at its last step, before the evaluation
        Once("on_test_begin", 2, fail),  # of the second epoch
        Once("on_epoch_end", 1, fail),  # after it, before the checkpoint
        Once("on_epoch_begin", 1, fail),  # of the third epoch
        Once("on_train_end", 1, fail),
    ]
    trained = interrupted(tmp_path, *ends)
    assert [event["step"] for event in trained.events("resumed")] == [2, 6, 13, 13, 14, 28]
    assert_same(trained, undisturbed)


@pytest.mark.parametrize(
    ("hook", "number", "resumed"), [("on_train_batch_end", 16, [2 * STEPS_PER_EPOCH]), ("on_epoch_end", 1, [])]
)
def test_checkpoints_that_are_rare_cost_what_was_done_since_and_points_stand_there_once(
    tmp_path: pathlib.Path, undisturbed: Trained, hook: str, number: int, resumed: list[int]
) -> None:
    trained = interrupted(tmp_path, Once(hook, number, fail), checkpoint=CheckpointPolicy(every_epochs=1))
    assert [event["step"] for event in trained.events("resumed")] == resumed
    assert trained.result.resumed_from_step == (resumed[0] if resumed else None)
    assert_same(trained, undisturbed)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "float16", "train_data": lambda: one_hot_digits(447), "eval_data": lambda: one_hot_digits(101)}
        | {"task": lambda: Supervised(loss=soft_loss(), metrics=[lambda: keras.metrics.AUC(from_logits=True)])},
        {"optimizer": ema_sgd, "num_microbatches": 2},
        {"optimizer": lambda: keras.optimizers.SGD(0.2, use_ema=True), "swa_start": 4},
        {"model": float8_model, "num_microbatches": 2},
    ],
    ids=["loss_scale, metric_of_vectors", "average, microbatches", "plain_mean", "float8"],
)
def test_every_kind_of_state_goes_on(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    whole = run(tmp_path / "whole", callbacks=memories(), **BASE | changes)
    assert_same(interrupted(tmp_path / "parts", Once("on_train_batch_end", 6, fail), **changes), whole)


def soft_loss() -> keras.losses.Loss:
    return keras.losses.CategoricalCrossentropy(from_logits=True)


# Told to leave


def test_a_signal_during_an_evaluation_ends_it_and_costs_no_step(tmp_path: pathlib.Path) -> None:
    changes = {
        "eval_data": lambda: digits(448),
        "eval_batch_size": 16,
        "checkpoint": CheckpointPolicy(every_steps=1000),
    }
    whole = run(tmp_path / "whole", callbacks=memories(), **BASE | changes)
    tests_ended: list[int] = []
    counting = keras.callbacks.LambdaCallback()
    counting.on_test_end = lambda logs=None: tests_ended.append(1)
    leaving = [*memories(), counting, Once("on_test_begin", 2, send(signal.SIGTERM))]
    ended = run(tmp_path / "parts", may_fail=True, callbacks=leaving, **BASE | changes)
    assert isinstance(ended.error, PreemptedError)
    assert len(tests_ended) == 1  # the second evaluation was not brought to its end
    trained = interrupted(tmp_path / "parts", **changes)
    assert [event["step"] for event in trained.events("resumed")] == [2 * STEPS_PER_EPOCH]
    assert_same(trained, whole)


class SwapsAverages(keras.callbacks.Callback):
    """Evaluates averages of the weights, as people write it."""

    average: list[np.ndarray] | None = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        weights = self.model.get_weights()
        before = weights if self.average is None else self.average
        self.average = [(a + b) / 2 for a, b in zip(before, weights, strict=True)]

    def on_test_begin(self, logs: Any = None) -> None:
        self.trained = self.model.get_weights()
        self.model.set_weights(self.average or self.trained)

    def on_test_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.trained)


def test_an_evaluation_of_weights_that_a_callback_has_swapped_ends_before_the_run_leaves(
    tmp_path: pathlib.Path,
) -> None:
    changes = {"eval_data": lambda: digits(448), "eval_batch_size": 16}
    whole = run(tmp_path / "whole", callbacks=[*memories(), SwapsAverages()], **BASE | changes)
    leaving = [*memories(), SwapsAverages(), Once("on_test_begin", 2, send(signal.SIGTERM))]
    assert isinstance(run(tmp_path / "parts", may_fail=True, callbacks=leaving, **BASE | changes).error, PreemptedError)
    assert_same(run(tmp_path / "parts", callbacks=[*memories(), SwapsAverages()], **BASE | changes), whole)


def test_a_second_signal_while_saving_tears_nothing(
    tmp_path: pathlib.Path, undisturbed: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, noticed = manager.write_checkpoint, tmp_path / "events.jsonl"

    def is_told_after_another() -> bool:
        send(signal.SIGTERM)()  # one that comes just before the main thread waits is noted only after the wait
        return "continues doing so" in noticed.read_text()

    def write_with_a_signal(*args: Any, **kwargs: Any) -> Any:
        wait_until(is_told_after_another, seconds=10)
        return write(*args, **kwargs)

    once = Once("on_train_batch_end", 4, send(signal.SIGTERM))
    with monkeypatch.context() as patch:
        patch.setattr(manager, "write_checkpoint", write_with_a_signal)
        settings = BASE | {"checkpoint": CheckpointPolicy(every_steps=1000)}
        ended = run(tmp_path, may_fail=True, callbacks=[*memories(), once], **settings)
    assert isinstance(ended.error, PreemptedError)
    assert_same(interrupted(tmp_path), undisturbed)


def test_a_notice_of_the_metadata_server_costs_no_step(
    tmp_path: pathlib.Path, undisturbed: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "events.jsonl"
    with MetadataServer() as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.address)

        def be_preempted() -> None:
            server.values["preempted"] = "TRUE"
            wait_until(lambda: "preemption_noticed" in events.read_text(), seconds=10)

        leaving = [*memories(), Once("on_train_batch_end", 5, be_preempted)]
        ended = run(
            tmp_path, may_fail=True, callbacks=leaving, **BASE | {"checkpoint": CheckpointPolicy(every_steps=1000)}
        )
        assert isinstance(ended.error, PreemptedError)
        assert "this VM is being preempted" in str(ended.error)
        monkeypatch.delenv("GCE_METADATA_HOST")
    assert_same(interrupted(tmp_path), undisturbed)


def test_the_status_of_leaving_is_a_setting(tmp_path: pathlib.Path) -> None:
    policy = CheckpointPolicy(preempted_exit_status=75)
    ended = run(
        tmp_path,
        may_fail=True,
        **BASE | {"checkpoint": policy},
        callbacks=[Once("on_epoch_end", 1, send(signal.SIGTERM))],
    )
    assert isinstance(ended.error, PreemptedError) and ended.error.exit_status == 75


# What a directory holds


def test_another_experiment_is_refused_until_its_changes_are_accepted(tmp_path: pathlib.Path) -> None:
    there = {"train.seed": "1", "train.epochs": "4", "tfdist.strategies.mirrored.Mirrored.num_gpus": "2"}
    here = there | {"train.seed": "2", "train.epochs": "6", "tfdist.strategies.mirrored.Mirrored.num_gpus": "4"}
    run(tmp_path, may_fail=True, named=there, callbacks=[Once("on_epoch_end", 2, fail)], **BASE)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    refused = run(tmp_path, may_fail=True, named=here, **BASE).error
    assert isinstance(refused, UserError) and refused.exit_status == EXIT_USER_ERROR
    assert "train.seed: 1 there, 2 here" in str(refused)
    assert "epochs" not in str(refused) and "num_gpus" not in str(refused)  # they may change
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == kept
    assert not (tmp_path / "result.json").exists()
    trained = run(tmp_path, named=here, accept_changes=True, **BASE)
    assert trained.result.resumed_from_step == 2 * STEPS_PER_EPOCH - 1


def test_training_data_of_another_size_is_another_experiment_until_that_is_accepted(tmp_path: pathlib.Path) -> None:
    settings = BASE | {"log_every_steps": None}
    run(tmp_path, may_fail=True, callbacks=[Once("on_epoch_end", 2, fail)], **settings)
    for count, steps in ((446, None), (200, "steps of an epoch: 7 there, 4 here")):
        less = settings | {"train_data": functools.partial(digits, count)}
        refused = str(run(tmp_path, may_fail=True, **less).error)
        assert f"at step 13; what differs:\n    examples of the training data: 447 there, {count} here" in refused
        assert "accept_changes = True" in refused and ("steps of an epoch" in refused) == bool(steps)
        assert not steps or steps in refused
    trained = run(tmp_path, accept_changes=True, **less)
    assert (trained.result.resumed_from_step, trained.result.steps) == (13, 16)
    assert not trained.events("file_damaged")  # as rows are where epochs ended before


@pytest.mark.parametrize(
    ("changed", "given", "acts"),
    [("my_module.build.rate", 0.25, 0.25), ("keras.optimizers.SGD.clipnorm", 0.5, 0.125), ("train.seed", 0.5, 0.125)],
)
def test_a_rate_that_was_changed_and_accepted_acts(
    tmp_path: pathlib.Path, changed: str, given: float, acts: float
) -> None:
    """Where only something else was changed, the checkpoint's rate counts, which a callback may have set."""

    class Lowering(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.125

    first = BASE | {"optimizer": lambda: keras.optimizers.SGD(0.5), "epochs": 1}
    run(tmp_path, named={changed: "1"}, callbacks=[Lowering()], **first)
    again = BASE | {"optimizer": lambda: keras.optimizers.SGD(given), "epochs": 2}
    trained = run(tmp_path, named={changed: "2"}, accept_changes=True, **again)
    assert trained.result.resumed_from_step == STEPS_PER_EPOCH
    points = [point for point in trained.points("train") if point["step"] > STEPS_PER_EPOCH]
    assert {point["learning_rate"] for point in points} == {acts}


def test_more_epochs_are_added_to_a_run_that_was_interrupted(tmp_path: pathlib.Path, undisturbed: Trained) -> None:
    run(tmp_path, callbacks=memories(), may_fail=True, **BASE | {"epochs": 2, "model": failing_export})
    assert not (tmp_path / "result.json").exists()
    trained = run(tmp_path, callbacks=memories(), **BASE)
    assert trained.bits() == undisturbed.bits()


def failing_export() -> keras.Model:
    model = stateful_model()
    model.save = lambda path: fail()
    return model


def test_a_damaged_checkpoint_is_passed_over_with_one_line(
    tmp_path: pathlib.Path, undisturbed: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, may_fail=True, callbacks=[*memories(), Once("on_train_batch_end", 5, fail)], **BASE)
    newest = max((tmp_path / "checkpoints").iterdir())
    (data,) = newest.glob("data-*")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    trained = interrupted(tmp_path)
    (passed,) = trained.events("checkpoint_passed_over")
    assert data.name in passed["details"]["message"] and str(newest) in passed["details"]["message"]
    assert capsys.readouterr().err.count("Passed over") + passed["details"]["message"].count("\n") <= 1
    (resumed,) = trained.events("resumed")
    assert resumed["step"] < passed["step"]
    assert_same(trained, undisturbed)


def test_without_checkpoints_nothing_is_kept_and_a_run_begins_anew(tmp_path: pathlib.Path) -> None:
    once = Once("on_train_batch_end", 5, fail)
    run(tmp_path, may_fail=True, **BASE | {"checkpoint": "off", "callbacks": [once]})
    assert not (tmp_path / "checkpoints").exists()
    trained = run(tmp_path, **BASE | {"checkpoint": "off"})
    assert trained.result.resumed_from_step is None
    assert not (tmp_path / "checkpoints").exists()
    assert [p["step"] for p in trained.points("train")] == [3, 6, 7, 9, 12, 14, 15, 18, 21, 24, 27, 28]


def test_checkpoints_that_cannot_be_written_leave_the_training_alone_or_stop_it(tmp_path: pathlib.Path) -> None:
    places = ("continue/checkpoints", "stop/checkpoints", "full/checkpoints", "full/export")
    for place in places:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).symlink_to("/proc/sys/vm")  # where even the superuser makes nothing
    trained = run(tmp_path / "continue", **BASE | {"epochs": 1})
    assert trained.result.steps == STEPS_PER_EPOCH
    failed = trained.events("checkpoint_failed")
    assert failed and all(event["level"] == "warning" for event in failed)
    full = run(tmp_path / "full", may_fail=True, **BASE | {"epochs": 1})
    assert re.search("could not be stored. .* work of all 7 steps is lost, and the same command", str(full.error))
    stopped = run(
        tmp_path / "stop", may_fail=True, **BASE | {"checkpoint": CheckpointPolicy(every_steps=1, on_error="stop")}
    )
    assert isinstance(stopped.error, UserError)
    assert "policy.CheckpointPolicy.on_error = 'continue'" in str(stopped.error)
    assert not (tmp_path / "stop" / "result.json").exists()


def test_a_model_that_changed_is_refused_with_all_differences(tmp_path: pathlib.Path) -> None:
    run(tmp_path, may_fail=True, callbacks=[Once("on_epoch_end", 1, fail)], **BASE)
    refused = run(tmp_path, may_fail=True, **BASE | {"model": lambda: stateful_model(units=24)}).error
    assert isinstance(refused, UserError)
    message = str(refused)
    assert "model/body/kernel: float32[64, 16] in the checkpoint, float32[64, 24] here" in message
    assert "model/head/kernel: float32[16, 10] in the checkpoint, float32[24, 10] here" in message
    assert "optimizer/" in message


# Other weights to begin with


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(tmp_path_factory.mktemp("source"), **BASE | {"epochs": 1})


def test_a_run_may_start_from_anothers_weights(tmp_path: pathlib.Path, source: Trained) -> None:
    newest = max((source.directory / "checkpoints").iterdir())
    paths = [source.directory, source.directory / "checkpoints", newest, source.directory / "export" / "model.keras"]
    bits = []
    for place, path in enumerate(paths):
        trained = run(tmp_path / str(place), **BASE | {"epochs": 1, "start_from": str(path)})
        assert trained.result.resumed_from_step is None and trained.result.steps == STEPS_PER_EPOCH
        assert int(trained.optimizer.iterations) == STEPS_PER_EPOCH
        assert trained.points("train")[0]["loss"] < source.points("train")[0]["loss"]
        bits.append(trained.bits())
    assert bits[0] == bits[1] == bits[2] == bits[3]  # with a start's own seeds, wherever the weights come from


def test_a_checkpoint_of_its_own_goes_before_the_weights_to_start_from(tmp_path: pathlib.Path, source: Trained) -> None:
    settings = BASE | {"start_from": str(source.directory), "epochs": 2}
    run(tmp_path, may_fail=True, callbacks=[Once("on_train_batch_end", 6, fail)], **settings)
    trained = run(tmp_path, **settings)
    assert trained.events("resumed") and len(trained.events("weights_loaded")) == 1


def test_a_start_without_weights_is_refused(tmp_path: pathlib.Path) -> None:
    refused = run(tmp_path / "run", may_fail=True, **BASE | {"start_from": str(tmp_path / "nothing")}).error
    assert isinstance(refused, UserError) and "train.start_from" in str(refused) and "nothing" in str(refused)


NAMES = {"encoder/(.*)": r"body/\1", "classifier/(.*)": r"head/\1"}
NAMED = BASE | {"model": lambda: named_model("encoder", "classifier"), "epochs": 1}


def test_weights_may_have_other_names_there(tmp_path: pathlib.Path) -> None:
    other = run(tmp_path / "other", **NAMED | {"model": lambda: named_model("body", "head")})
    still = {"start_from": (str(other.directory), NAMES), "optimizer": lambda: keras.optimizers.SGD(0.0)}
    found = run(tmp_path / "run", **NAMED | still)
    assert_same_bits(found.weights(), other.weights())
    half = {"start_from": (str(other.directory), {"encoder/(.*)": r"body/\1"}), "accept_changes": True}
    found = run(tmp_path / "half", **NAMED | still | half)
    np.testing.assert_array_equal(found.model.get_weights()[0], other.model.get_weights()[0])
    assert np.any(found.model.get_weights()[2] != other.model.get_weights()[2])
    assert "head/kernel" in str(found.events("partially_restored"))


test_wrong_names_are_one_message = each_is_refused(
    lambda path, names, tmp_path, source: run(
        tmp_path / "run", **NAMED | {"start_from": (str(source.directory / path), names)}
    ),
    ("export/model.keras", NAMES, "'body/kernel', which is not there. There are layers/batch_normalization/vars/0"),
    ("", {"encoding/(.*)": "body"}, "'encoding/(.*)', which no variable of the model matches"),
    ("", {"encoder/(.*)": r"bodies/\1"}, "calls 'encoder/kernel' 'bodies/kernel'"),
    ("", {"(": "body"}, "or a pair, ('runs/a', {'encoder/(.*)'"),
)


class SetsUp(keras.callbacks.Callback):
    """Reads the rate in its first hooks, sets rate and weights there, draws a number, and goes on from these."""

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self.base = float(model.optimizer.learning_rate)

    def on_train_begin(self, logs: Any = None) -> None:
        self.again, self.drawn = float(self.model.optimizer.learning_rate), np.random.rand()
        self.model.optimizer.learning_rate = self.base / 2
        self.model.layers[-1].bias.assign(np.full(10, 3.0 + self.drawn))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        assert self.base == self.again
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.5 + self.base / 100


def test_what_the_first_hooks_read_and_assign_is_as_in_a_run_that_never_stopped(tmp_path: pathlib.Path) -> None:
    changes = BASE | {"checkpoint": CheckpointPolicy(every_steps=3), "deterministic": True}
    whole = run(tmp_path / "whole", **changes | {"callbacks": [SetsUp()]})
    for ends in (Once("on_train_batch_end", 16, fail), Once("on_train_batch_end", 4, send(signal.SIGTERM))):
        assert run(tmp_path / "run", may_fail=True, **changes | {"callbacks": [SetsUp(), ends]}).error is not None
    resumed = run(tmp_path / "run", **changes | {"callbacks": [SetsUp()]})
    assert len(resumed.events("resumed")) == 2
    assert resumed.result.resumed_from_step
    assert resumed.bits() == whole.bits()
    assert float(resumed.optimizer.learning_rate) == float(whole.optimizer.learning_rate)
