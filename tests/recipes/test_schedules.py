"""Schedules count themselves from the run; Keras's are what Keras computes, ours what their formulas say."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import schedules as of_keras
from mistakes import call, each_is_refused
from training.trainings import STEPS_PER_EPOCH, run

import tfdist
from tfdist.data.batches import BatchPlan
from tfdist.recipes import schedules
from tfdist.recipes.lengths import RunLength, parse_length
from tfdist.training.loop.boundaries import LengthSettings
from tfdist.training.run.assembly import length_of

RUN = RunLength(total_steps=100, steps_per_epoch=20, examples_per_epoch=630, global_batch_size=32)


def values(schedule: Any, run: RunLength = RUN) -> np.ndarray:
    """The schedule at each step of the run, and ten steps more."""
    schedules.bind(schedule, run)
    rate = tf.function(lambda step: schedule(step), autograph=False)
    return np.array([float(rate(step)) for step in tf.range(run.total_steps + 10)])


@pytest.mark.parametrize(
    ("counted", "kerass"),
    [
        (schedules.CosineDecay(0.1, "2 epochs", alpha=0.1), of_keras.CosineDecay(0.1, 40, alpha=0.1)),
        (
            schedules.CosineDecay(0.0, "0.5 of run", warmup_target=0.2, warmup_steps="10 steps"),
            of_keras.CosineDecay(0.0, 50, warmup_target=0.2, warmup_steps=10),
        ),
        (schedules.CosineDecayRestarts(0.1, "1 epochs"), of_keras.CosineDecayRestarts(0.1, 20)),
        (schedules.ExponentialDecay(0.1, "630 examples", 0.5), of_keras.ExponentialDecay(0.1, 20, 0.5)),
        (schedules.InverseTimeDecay(0.1, 10, 0.5), of_keras.InverseTimeDecay(0.1, 10, 0.5)),
        (
            schedules.PiecewiseConstantDecay(["1 epochs", "0.5 of run"], [0.1, 0.01, 0.001]),
            of_keras.PiecewiseConstantDecay([20, 50], [0.1, 0.01, 0.001]),
        ),
        (schedules.PolynomialDecay(0.1, "1 of run", power=2.0), of_keras.PolynomialDecay(0.1, 100, power=2.0)),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_kerass_schedules_are_kerass(counted: Any, kerass: Any) -> None:
    np.testing.assert_array_equal(values(counted), values(kerass))
    longer = RunLength(total_steps=400, steps_per_epoch=80, examples_per_epoch=630, global_batch_size=8)
    if not isinstance(counted, schedules.InverseTimeDecay):
        assert (
            np.abs(values(counted, longer)[:100] - values(kerass)[:100]).max() > 1e-3
        )  # another run, another schedule


def cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0)))


@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        (schedules.Warmup(0.4, "10 steps"), lambda t: 0.4 * min(t / 10, 1)),
        (schedules.Warmup(0.4, "10 steps", start=0.5), lambda t: 0.4 * min(0.5 + 0.5 * t / 10, 1)),
        (
            schedules.Warmup(of_keras.CosineDecay(0.4, 50), "1 epochs"),
            lambda t: 0.4 * min(t / 20, 1) * cosine((t - 20) / 50),
        ),
        (schedules.InverseSquareRoot(0.1, "1 epochs"), lambda t: 0.1 * math.sqrt(20 / max(t, 20))),
        (
            schedules.WarmupStableDecay(0.2, "0.1 of run", "0.4 of run", end=0.1),
            lambda t: 0.2 * min(t / 10, 1) * (0.1 + 0.9 * (1 - min(max((t - 60) / 40, 0), 1))),
        ),
        (schedules.ForBatch(0.1, 256), lambda t: 0.1 * 32 / 256),
        (
            schedules.ForBatch(schedules.CosineDecay(0.1, "1 of run"), 128, rule="square root"),
            lambda t: 0.1 * 0.5 * cosine(t / 100),
        ),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, schedules.Schedule) else "",
)
def test_a_schedule_is_its_formula(schedule: Any, formula: Callable[[int], float]) -> None:
    np.testing.assert_allclose(values(schedule), [formula(t) for t in range(110)], rtol=1e-5, atol=1e-7)


test_a_wrong_setting_is_one_message = each_is_refused(
    call,
    (lambda: schedules.CosineDecay(0.1, "12 epoch s"), "CosineDecay.decay_steps is '12 epoch s'; write"),
    (lambda: schedules.PiecewiseConstantDecay(["x"], [1.0, 2.0]), "PiecewiseConstantDecay.boundaries is 'x'"),
    (lambda: schedules.Warmup("0.1"), "Warmup.then is '0.1'; write a rate, or a schedule"),
    (lambda: schedules.WarmupStableDecay(0.1, end=2), "WarmupStableDecay.end is 2; write a number from 0 to 1."),
    (lambda: schedules.ForBatch(0.1, 0), "ForBatch.base_batch_size is 0; write a whole number"),
    # what does not fit into the run
    (
        lambda: values(schedules.WarmupStableDecay(0.1, "90 steps", "0.4 of run")),
        "rises for 90 steps and falls for 40, and the run has 100",
    ),
    (lambda: values(schedules.CosineDecay(0.1, "0 steps")), "CosineDecay: .*decay_steps"),
)


def test_a_schedule_goes_through_kerass_configuration() -> None:
    made = schedules.Warmup(schedules.CosineDecay(0.1, "2 epochs"), "5 steps")
    again = of_keras.deserialize(of_keras.serialize(made))
    np.testing.assert_array_equal(values(again), values(made))


@pytest.mark.parametrize(("length", "steps"), [("2 epochs", 6), ("120 examples", 12), ("0.5 of run", 6)])
def test_a_length_counts_the_epochs_of_the_run(length: str, steps: int) -> None:
    run = length_of(LengthSettings(epochs=4, steps_per_epoch=3), BatchPlan(100, 11, num_replicas=1))
    assert parse_length("", length).steps(run) == steps


@pytest.mark.slow
def test_a_training_has_the_weights_of_one_whose_steps_were_counted_by_hand(tmp_path: pathlib.Path) -> None:
    def by_hand() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(of_keras.CosineDecay(0.2, 3 * STEPS_PER_EPOCH))

    def counted() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(schedules.CosineDecay(0.2, "1 of run"))

    expected = run(tmp_path / "by_hand", optimizer=by_hand, epochs=3)
    assert run(tmp_path / "counted", optimizer=counted, epochs=3).bits() == expected.bits()


def test_every_schedule_is_a_name_of_tfdist() -> None:
    classes = [each for each in vars(schedules).values() if isinstance(each, type) and schedules.Schedule in each.mro()]
    assert all(getattr(tfdist, each.__name__) is each for each in classes if each is not schedules.Schedule)
    assert len(classes) == 11
