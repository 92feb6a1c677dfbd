"""A batch whose examples weigh nothing in all changes nothing, is left out of the logged loss, and is told of."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from equivalence.cases import dense_model, digits, with_weightless_batch
from training.test_precision import state
from training.trainings import run

from tfdist.training.loop import learner
from tfdist.training.step.precision import LossScale

WEIGHTLESS: dict[str, Any] = {
    "train_data": with_weightless_batch,
    "eval_data": None,
    "shuffle": False,
    "epochs": 1,
    "deterministic": True,
}
NOTE = "1 step had examples that weigh nothing in all; it changed nothing, and the logged loss leaves it out."
NOTES = "{} steps had examples that weigh nothing in all; they changed nothing, and the logged loss leaves them out."
NO_EVALUATION = "The examples of the evaluation weigh nothing in all: it has no loss."


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 4), momentum=0.9, weight_decay=0.1)


def averaged_adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(3e-3, use_ema=True, ema_overwrite_frequency=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": momentum, "deterministic": False},
        {"optimizer": averaged_adam, "deterministic": True, "num_microbatches": 2},
        {"optimizer": momentum, "precision": "float16"},
    ],
    ids=["momentum", "deterministic_adam", "float16"],
)
def test_training_is_as_if_a_batch_of_no_weight_had_not_been_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    scales = []
    monkeypatch.setattr(learner, "LossScale", lambda size: scales.append(LossScale(size)) or scales[-1])
    trained = run(tmp_path / "with", **WEIGHTLESS | changes, steps_per_call=3)
    left_out = WEIGHTLESS | changes | {"train_data": lambda: with_weightless_batch(batches=(0, 2))}
    other = run(tmp_path / "without", **left_out)
    assert trained.bits() == other.bits()
    assert [int(t.optimizer.iterations.numpy()) for t in (trained, other)] == [2, 2]
    assert trained.result.train_metrics == other.result.train_metrics
    assert (trained.result.notes, other.result.notes) == ([NOTE], [])
    (event,) = trained.events("weightless_step")
    assert (event["level"], event["step"]) == ("warning", 3)
    assert [e["details"]["message"] for e in trained.events("weightless_steps")] == [NOTE]
    assert json.loads((tmp_path / "with" / "result.json").read_text())["notes"] == [NOTE]
    assert not trained.events("gradient_overflow")
    if scales:
        assert state(scales[0]) == state(scales[1])


@pytest.mark.slow
def test_where_nothing_weighs_anything_nothing_is_learned_and_there_is_no_loss(tmp_path: pathlib.Path) -> None:
    def nothing() -> Any:
        images, labels = digits(192)
        return images, labels, np.zeros(192, np.float32)

    first: list[list[np.ndarray]] = []

    def model() -> keras.Model:
        built = dense_model(regularizer=keras.regularizers.L2(0.1))
        first.append(built.get_weights())
        return built

    settings = WEIGHTLESS | {"epochs": 2, "optimizer": momentum, "model": model, "deterministic": False}
    settings |= {"train_data": nothing, "eval_data": nothing}
    stops = [keras.callbacks.TerminateOnNaN(), keras.callbacks.EarlyStopping("val_loss", patience=0)]
    trained = run(tmp_path, **settings, callbacks=stops)
    assert all((a == b).all() for a, b in zip(trained.weights(), first[-1], strict=True))
    assert int(trained.optimizer.iterations.numpy()) == 0
    assert trained.result.epochs == 2
    assert trained.result.notes == [
        NO_EVALUATION,
        NOTES.format(6),
    ]
    assert "loss" not in trained.result.train_metrics
    assert "loss" not in trained.result.eval_metrics
    assert all("loss" not in point for split in ("train", "eval") for point in trained.points(split))
    assert len(trained.events("weightless_step")) == len(trained.events("weightless_evaluation")) == 1


@pytest.mark.slow
def test_what_is_counted_goes_on_after_a_restart(tmp_path: pathlib.Path) -> None:
    settings = WEIGHTLESS | {"epochs": 2, "optimizer": averaged_adam}
    whole = run(tmp_path / "whole", **settings)
    run(tmp_path / "parts", **settings, stop_after_epochs=1)
    parts = run(tmp_path / "parts", **settings)
    assert parts.bits() == whole.bits()
    assert parts.points("train")[-1]["loss"] == whole.points("train")[-1]["loss"]
    assert math.isfinite(parts.result.train_metrics["loss"])
    assert parts.result.notes == whole.result.notes == [NOTES.format(2)]
    assert len(parts.events("weightless_step")) == 1
