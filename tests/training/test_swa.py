"""Stochastic weight averaging: the average is the plain mean of the last weights.

test_resume.py holds that a resumed run has the same.
"""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from equivalence.cases import dense_model, digits, sgd
from mistakes import each_is_refused
from training.trainings import run


class Weights(keras.callbacks.Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[list[np.ndarray]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.after.append([np.array(w) for w in self.model.get_weights()])


@pytest.mark.slow
def test_a_run_ends_with_the_mean_of_the_last_weights(tmp_path: pathlib.Path) -> None:
    seen = Weights()
    averaging = {"optimizer": lambda: keras.optimizers.SGD(0.2, use_ema=True), "swa_start": "0.5 of run"}
    trained = run(tmp_path, **averaging, epochs=4, callbacks=[seen])
    half = len(seen.after) // 2
    assert len(seen.after) == 28
    for i, average in enumerate(trained.weights()):
        mean = np.mean([weights[i] for weights in seen.after[half:]], axis=0)
        np.testing.assert_allclose(average, mean, rtol=1e-5, atol=1e-6)
        assert np.abs(average - seen.after[-1][i]).max() > 1e-4


@pytest.mark.slow
def test_batch_statistics_are_then_the_means_over_the_batches(tmp_path: pathlib.Path) -> None:
    def model() -> keras.Model:
        return dense_model(batch_norm=True)

    def averaged() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.9)

    settings = {"model": model, "optimizer": averaged, "shuffle": False, "deterministic": True}
    plain = run(tmp_path / "plain", **settings)
    renewed = run(tmp_path / "renewed", swa_start="0.5 of run", **settings)
    kernel, images = renewed.weights()[0], digits()[0]
    sums = (images @ kernel).reshape(7, 64, -1)
    found = {v.path.rpartition("/")[2]: v.numpy() for v in renewed.model.non_trainable_variables}
    np.testing.assert_allclose(found["moving_mean"], sums.mean(1).mean(0), atol=1e-5)
    np.testing.assert_allclose(found["moving_variance"], sums.var(1).mean(0), rtol=1e-4)
    before, after = (each.model.non_trainable_variables[0].numpy() for each in (plain, renewed))
    assert np.abs(before - after).max() > 1e-3
    assert renewed.result.eval_metrics["loss"] != plain.result.eval_metrics["loss"]  # it was evaluated with them
    assert next(layer for layer in renewed.model.layers if hasattr(layer, "momentum")).momentum == 0.9
    exported = [v.numpy() for v in renewed.exported().non_trainable_variables]
    np.testing.assert_array_equal(exported[0], found["moving_mean"])


test_what_cannot_be_averaged_is_refused = each_is_refused(
    lambda start, tmp_path: run(tmp_path, optimizer=sgd, swa_start=start),
    ("0.75 of run", "SGD keeps no average of the weights. Write keras.optimizers.SGD.use_ema"),
    ("75 %", "a length"),
)
