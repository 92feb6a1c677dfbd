"""Metrics summed over the replicas are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import one_hot_digits
from training.trainings import Trained, run
from training.under_mirrored import MANY_METRICS
from unequal_experiments import Largest

from tfdist.errors import UserError
from tfdist.tasks.supervised import Supervised
from tfdist.training.loop.learner import check_metric_sums

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(tmp_path_factory.mktemp("trained"), **MANY_METRICS)


def test_two_replicas_report_what_one_device_does(trained: Trained, mirrored: Callable[[str], Any]) -> None:
    found = mirrored("metrics")
    for split, metrics in (("train", trained.result.train_metrics), ("eval", trained.result.eval_metrics)):
        assert list(found[split]) == list(metrics)
        for name, value in metrics.items():
            np.testing.assert_allclose(found[split][name], value, atol=2e-6, err_msg=f"{split} {name}")


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
