"""Batch statistics taken anew are those of the weights at the end, over the batches of the training."""

from __future__ import annotations

import pathlib

import keras
import numpy as np
from equivalence.cases import dense_model, digits
from training.trainings import run


def test_they_are_the_means_over_the_batches(tmp_path: pathlib.Path) -> None:
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
