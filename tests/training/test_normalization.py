"""Batch statistics, what layers add to the loss, random numbers and metrics do not depend on the number of replicas."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import dense_model, one_hot_digits
from training.trainings import Trained, differ, run
from training.under_mirrored import MANY_METRICS, moments_data
from unequal_experiments import Largest

from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Topology
from tfdist.tasks.supervised import Supervised
from tfdist.training.loop.learner import check_metric_sums
from tfdist.training.step.lockstep import meet, side_by_side
from tfdist.training.step.normalization import synchronize


def normalized() -> Any:
    return dense_model(batch_norm=True)


def replicas(count: int) -> OneDevice:
    """A strategy that says it has so many replicas."""
    strategy = OneDevice()
    strategy._topology = Topology(worker_index=0, num_workers=1, num_local_replicas=count)
    return strategy


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("offset", [0.0, 100.0, 1000.0])
def test_moments_over_two_replicas_are_those_of_the_whole_batch(
    mirrored: Callable[[str], Any], offset: float, masked: bool
) -> None:
    inputs, mask = moments_data(offset, masked=masked)
    exact = inputs.astype(np.float64)
    counted = np.ones(mask.shape, bool) if not masked else mask
    rows = exact[counted]
    found = mirrored(f"moments_{offset:g}_{masked}")
    for mean, variance in zip(found["mean"], found["variance"], strict=True):
        np.testing.assert_allclose(mean, rows.mean(0), rtol=3e-7, atol=1e-6)
        np.testing.assert_allclose(variance, rows.var(0), rtol=2e-5)
    # Of Σ (mean² + variance²) on each of the two replicas.
    centered = exact - rows.mean(0)
    gradient = 2 * 2 * (rows.mean(0) + 2 * rows.var(0) * centered) / len(rows) * counted[..., None]
    assert differ(found["gradient"], gradient) < 1e-5 * max(1.0, np.abs(gradient).max())


@pytest.mark.slow
def test_statistics_of_microbatches_are_told_of(tmp_path: pathlib.Path) -> None:
    settings = {"model": normalized, "eval_data": None, "steps": 1}
    trained = run(tmp_path / "cut", num_microbatches=4, **settings)
    (note,) = trained.result.notes
    assert note.startswith("Batch normalization (batch_normalization")
    assert "takes the statistics of each of the 4 microbatches, not of the whole batch of 64" in note
    assert json.loads((tmp_path / "cut" / "result.json").read_text())["notes"] == [note]
    (event,) = trained.events("microbatch_statistics")
    assert (event["level"], event["details"]["message"]) == ("warning", note)
    assert run(tmp_path / "whole", **settings).result.notes == []
    assert run(tmp_path / "plain", num_microbatches=4, eval_data=None, steps=1).result.notes == []


def test_layers_that_ask_for_it_are_synchronized_and_own_statistics_are_left_alone() -> None:
    class OwnStatistics(keras.layers.BatchNormalization):
        def _moments(self, inputs: Any, mask: Any) -> Any:
            return super()._moments(inputs, mask)

    asks, own = keras.layers.BatchNormalization(synchronized=True), OwnStatistics()
    model = keras.Sequential([keras.Input((4,)), asks, own])
    with Patches() as patches:
        changed = synchronize(model, replicas(2), patches, wanted=False)
        assert (changed, "_moments" in vars(asks)) == (1, True)
    with Patches() as patches:
        synchronize(model, replicas(2), patches, wanted=True)
        assert "_moments" not in vars(own)


def traced_together(*functions: Callable[[], tf.Tensor]) -> list[float]:
    return [float(value) for value in tf.function(lambda: side_by_side(functions, tf.add_n), autograph=False)()]


def test_every_function_gets_what_all_of_them_make() -> None:
    found = traced_together(lambda: 1.0 + meet(meet(tf.constant(2.0))), lambda: meet(10.0 * meet(tf.constant(3.0))))
    assert found == [56.0, 55.0]


def test_where_one_fails_the_others_end_too() -> None:
    def fails() -> tf.Tensor:
        meet(tf.constant(1.0))
        raise ZeroDivisionError

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        traced_together(lambda: meet(meet(tf.constant(1.0))), fails, lambda: meet(meet(tf.constant(1.0))))
    assert threading.active_count() == before


# Metrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(tmp_path_factory.mktemp("trained"), **MANY_METRICS)


@pytest.mark.slow
def test_two_replicas_report_what_one_device_does(trained: Trained, mirrored: Callable[[str], Any]) -> None:
    found = mirrored("metrics")
    for split, metrics in (("train", trained.result.train_metrics), ("eval", trained.result.eval_metrics)):
        assert list(found[split]) == list(metrics)
        for name, value in metrics.items():
            np.testing.assert_allclose(found[split][name], value, atol=2e-6, err_msg=f"{split} {name}")


@pytest.mark.slow
def test_evaluation_is_keras_own_over_all_examples(trained: Trained) -> None:
    model = trained.exported()
    model.compile(
        loss=MANY_METRICS["task"]()._losses["output"],
        metrics=[s.build() for s in MANY_METRICS["task"]().metric_specs()],
    )
    theirs = model.evaluate(*one_hot_digits(), batch_size=64, verbose=0, return_dict=True)
    assert set(theirs) == set(trained.result.eval_metrics)
    for name, value in trained.result.eval_metrics.items():
        np.testing.assert_allclose(theirs[name], value, atol=1e-5, err_msg=name)
    (point,) = trained.points("eval")
    assert len(point["f1"]) == 10  # one number a class, as a list


class OwnMean(keras.metrics.Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(keras.ops.abs(y_true - y_pred), sample_weight)


@pytest.mark.slow
@pytest.mark.parametrize("texts", [False, True])
def test_a_run_on_several_replicas_refuses_a_metric_of_ones_own_that_is_no_sum(texts: bool) -> None:
    class Draws(keras.layers.Layer):
        """Counts and draws at each call, which the check must not show."""

        def __init__(self) -> None:
            super().__init__()
            self.seeds, self.calls = keras.random.SeedGenerator(1), self.add_weight(shape=(), trainable=False)

        def call(self, x: Any) -> Any:
            self.calls.assign_add(1.0)
            return x + keras.random.uniform(keras.ops.shape(x), seed=self.seeds)

    inputs = keras.Input((2,), dtype="string" if texts else "float32")
    x = keras.layers.Hashing(5, output_mode="one_hot")(inputs) if texts else inputs
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(Draws()(x)))
    structure = (tf.TensorSpec([None, 2], tf.string if texts else tf.float32), tf.TensorSpec([None, 1], tf.float32))
    before = [np.array(v) for v in model.variables]

    def check(metric: Any, num_replicas: int = 2) -> None:
        check_metric_sums(
            model, Supervised(loss="mse", metrics=[keras.metrics.MeanAbsoluteError, metric]), structure, num_replicas
        )

    check(OwnMean)
    check(Largest, 1)
    with pytest.raises(UserError, match="'largest' is not made of sums over examples, so 2 replicas"):
        check(Largest)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.variables, strict=True))
