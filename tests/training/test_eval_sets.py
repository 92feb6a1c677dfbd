"""Evaluation on several sets: each set's numbers are those of an evaluation of it alone, and everything knows them."""

from __future__ import annotations

import csv
import json
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import classification, dense_model, digits
from mistakes import each_is_refused
from training.trainings import SMALL, Trained

import tfdist
from tfdist.errors import UserError
from tfdist.experiment import evaluate, train, validate
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.training.run.eval_sets import EvalSet
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import EvaluateSettings, TrainSettings


def first_set() -> Any:
    return tuple(part[200:301] for part in digits(358))


def second_set() -> Any:
    return tuple(part[301:] for part in digits(358))


def settings(eval_data: Any, **others: Any) -> TrainSettings:
    given = {"train_data": lambda: digits(200), "eval_data": eval_data, "global_batch_size": 32, "epochs": 3}
    return TrainSettings(**SMALL | {"task": classification(), "strategy": OneDevice()} | given | others)


@pytest.mark.slow
def test_each_set_has_the_numbers_of_an_evaluation_of_it_alone(tmp_path: pathlib.Path) -> None:
    sets = {"near": first_set, "far": EvalSet(second_set, batch_size=16)}
    train(settings(sets), Request(run_dir=str(tmp_path / "both")))
    for name, data, size in (("near", first_set, 32), ("far", second_set, 16)):
        train(settings(data, eval_batch_size=size), Request(run_dir=str(tmp_path / name)))
    both, near, far = (Trained(tmp_path / name).points("eval") for name in ("both", "near", "far"))
    assert len(both) == 3
    for point, first, second in zip(both, near, far, strict=True):
        for metric in ("loss", "sparse_categorical_accuracy"):
            assert (point[metric], point[f"far_{metric}"]) == (first[metric], second[metric])


def test_callbacks_checkpoints_and_results_know_each_set(tmp_path: pathlib.Path) -> None:
    callbacks = [
        keras.callbacks.EarlyStopping("val_far_loss", patience=1, mode="max", restore_best_weights=True),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.TensorBoard(str(tmp_path / "board")),
        keras.callbacks.ModelCheckpoint(
            str(tmp_path / "{val_far_loss:.3f}.keras"), "val_far_loss", save_best_only=True
        ),
    ]
    policy = tfdist.CheckpointPolicy(keep_best="val_far_sparse_categorical_accuracy")
    sets = {"near": first_set, "far": second_set}
    result = train(
        settings(sets, callbacks=callbacks, checkpoint=policy, epochs=9), Request(run_dir=str(tmp_path / "run"))
    )
    assert result is not None and result.epochs == 2  # the loss falls, which counts as worse
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["best"]["metric"] == "val_far_sparse_categorical_accuracy"
    assert {"loss", "far_loss"} <= written["eval_metrics"].keys()
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert float(rows[1]["val_far_loss"]) == pytest.approx(Trained(tmp_path / "run").points("eval")[1]["far_loss"])
    assert len(list(tmp_path.glob("*.keras"))) == 2
    (board,) = (tmp_path / "board" / "validation").iterdir()
    tags = {value.tag for event in tf.compat.v1.train.summary_iterator(str(board)) for value in event.summary.value}
    assert {"epoch_loss", "epoch_far_loss"} <= tags


@pytest.mark.slow
def test_trained_weights_are_evaluated_on_each_set(tmp_path: pathlib.Path) -> None:
    sets = {"near": first_set, "far": EvalSet(second_set, num_batches=1)}
    train(settings(sets), Request(run_dir=str(tmp_path)))
    trained = EvaluateSettings(model=dense_model, task=settings(sets).task, data=sets, global_batch_size=32)
    found = evaluate(trained, Request(run_dir=str(tmp_path)))
    last = Trained(tmp_path).points("eval")[-1]
    assert found == {name: pytest.approx(last[name]) for name in found} and "far_loss" in found
    few = evaluate(
        EvaluateSettings(
            model=dense_model, task=settings(sets).task, data=lambda: tuple(each[:32] for each in second_set())
        ),
        Request(run_dir=str(tmp_path)),
    )
    assert found["far_loss"] == pytest.approx(few["loss"])


def test_validation_takes_as_many_batches_of_a_set_as_training() -> None:
    told: list[str] = []
    validate(settings({"near": first_set, "far": EvalSet(second_set, batch_size=16, num_batches=2)}), told.append)
    assert [line.partition(" of (")[0] for line in told if line.startswith("evaluation (far) data")] == [
        "evaluation (far) data: 32 examples"
    ]
    with pytest.raises(UserError, match="is a stream, of which num_batches cannot be taken"):
        validate(settings({"near": first_set, "far": EvalSet(stream, num_batches=2)}), told.append)


class StopsAtThird(keras.callbacks.Callback):
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_evaluating |= batch == 2


@pytest.mark.slow
@pytest.mark.parametrize("callbacks", [[], [StopsAtThird()]], ids=["whole", "the first stopped"])
def test_fit_takes_sets_by_name(callbacks: list[keras.callbacks.Callback]) -> None:
    histories = []
    for data in ({"near": first_set(), "far": second_set()}, first_set(), second_set()):
        keras.utils.set_random_seed(1)
        model = dense_model()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        given: dict[str, Any] = {"validation_data": data, "callbacks": callbacks}
        fitted = tfdist.fit(model, *digits(200), epochs=2, shuffle=False, verbose=0, **given)
        histories.append(fitted.history)
    both, near, far = histories
    assert (both["val_loss"], both["val_far_loss"]) == (near["val_loss"], far["val_loss"])


def named_after_a_set() -> Supervised:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Supervised(loss=loss, metrics=[lambda: keras.metrics.SparseCategoricalAccuracy(name="sparse_loss")])


def stream() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(first_set())


test_a_mistake_is_one_message = each_is_refused(
    lambda changes, tmp_path: train(settings(**changes), Request(run_dir=str(tmp_path))),
    ({"eval_data": {}}, "train.eval_data is {}; write a function"),
    ({"eval_data": {"a b": first_set}}, "or several by name, {'test': @my_module.test}"),
    ({"eval_data": {"a": 3}}, "train.eval_data is {'a': 3}"),
    (
        {"eval_data": {"a": first_set, "sparse": first_set}, "task": named_after_a_set()},
        "A set of train.eval_data would have the metric 'sparse_loss', as another has. Rename the set.",
    ),
    (
        {"eval_data": {"a": first_set, "b": EvalSet(stream, num_batches=2)}},
        "The evaluation (b) data is a stream, of which num_batches cannot be taken. Return dataset.take(64)",
    ),
    (
        {"eval_data": {"a": first_set, "b": second_set}, "callbacks": [keras.callbacks.EarlyStopping("val_a_loss")]},
        "EarlyStopping monitors 'val_a_loss', which is not reported",
    ),
    (
        {"eval_data": {"a": first_set, "b": lambda: (np.zeros((4, 3)), np.zeros(4))}},
        "batches of ('float32[None, 3]'",
    ),
)


def test_a_set_checks_what_it_is_given() -> None:
    with pytest.raises(UserError, match=r"EvalSet\.batch_size is 0; write a whole number of at least 1"):
        EvalSet(first_set, batch_size=0)
