"""float16 and bfloat16 learn as float32 does; an overflow anywhere skips the step everywhere and leaves no trace."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import digits
from training.trainings import run

from tfdist.errors import DivergedError
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
