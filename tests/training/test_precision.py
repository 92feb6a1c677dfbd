"""float16 and bfloat16 learn as float32 does; a step of an overflow, or of a batch without weight, changes nothing."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import dense_model, digits, with_weightless_batch
from training.trainings import run

from tfdist.errors import DivergedError
from tfdist.training.loop import learner
from tfdist.training.step.precision import LossScale


def state(scale: LossScale) -> tuple[float, int]:
    return float(scale.scale.numpy()), int(scale.good_steps.numpy())


def updated(scale: LossScale, *finite: bool) -> tuple[float, int]:
    for each in finite:
        scale.update(tf.constant(each))
    return state(scale)


def test_the_scale_doubles_after_good_steps_and_halves_at_an_overflow() -> None:
    scale = LossScale(64, initial=8.0, steps_to_double=3)
    assert updated(scale, True, True) == (8.0, 2)
    assert updated(scale, True) == (16.0, 0)
    assert updated(scale, True, False) == (8.0, 0)
    assert updated(scale, True, True, True, True) == (16.0, 1)


def test_the_scale_keeps_its_bounds() -> None:
    assert updated(LossScale(64, initial=4.0), *[False] * 5) == (1.0, 0)
    assert updated(LossScale(64, initial=2.0**23, steps_to_double=1), *[True] * 4) == (2.0**24, 0)


@pytest.mark.parametrize("batch_size", [1, 63, 64, 100])
def test_the_scale_is_that_of_the_mean_loss_and_a_power_of_two(batch_size: int) -> None:
    mantissa, _ = np.frexp(float(LossScale(batch_size).factor()))
    assert mantissa == 0.5
    assert 1.0 <= float(LossScale(batch_size).factor()) * batch_size / 2.0**15 < 2.0


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_learns_the_digits(tmp_path: pathlib.Path, precision: str) -> None:
    trained = run(
        tmp_path,
        precision=precision,
        epochs=20,
        optimizer=lambda: keras.optimizers.Adam(3e-3),
        train_data=lambda: digits(1500),
    )
    assert trained.result.eval_metrics["sparse_categorical_accuracy"] >= 0.97
    assert {w.dtype for w in trained.weights()} == {np.dtype("float32")}
    assert trained.model.layers[1].compute_dtype == precision
    loaded = trained.exported().predict(digits(101)[0], verbose=0)
    assert np.mean(np.argmax(loaded, -1) == digits(101)[1]) >= 0.97


@pytest.mark.slow
def test_what_overflows_even_at_scale_1_is_a_divergence(tmp_path: pathlib.Path) -> None:
    images, labels = digits()
    large = {"train_data": lambda: (images * 1e6, labels), "recovery": "off"}
    trained = run(tmp_path, precision="float16", **large, epochs=20, may_fail=True)
    assert isinstance(trained.error, DivergedError)
    assert "overflow float16 even at loss scale 1" in str(trained.error)
    assert all(np.isfinite(w).all() for w in trained.weights())


@pytest.mark.slow
def test_an_overflow_on_one_replica_skips_the_step_on_all(mirrored: Callable[[str], Any]) -> None:
    """As if that batch had not been there: weights, batch statistics and metrics, on every replica, bit by bit."""
    found = mirrored("overflow")
    assert found["skipped"] == [{"step": 2, "steps": 1, "loss_scale": 2.0**14}]
    assert found["copies"] == found["left_out"]
    assert len(set(found["copies"])) == len(found["copies"]) // 2  # both replicas hold the same
    assert found["metrics"] == found["metrics_left_out"]


# Batches of no weight


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
    assert trained.result.notes == [NO_EVALUATION, NOTES.format(6)]
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
