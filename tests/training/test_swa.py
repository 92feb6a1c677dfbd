"""Stochastic weight averaging: the average is the plain mean of the last weights, and a resumed run has the same."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from training.trainings import run

from tfdist.errors import UserError


class Weights(keras.callbacks.Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[list[np.ndarray]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.after.append([np.array(w) for w in self.model.get_weights()])


def averaging() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.2, use_ema=True)


@pytest.mark.slow
def test_a_run_ends_with_the_mean_of_the_last_weights(tmp_path: pathlib.Path) -> None:
    seen = Weights()
    trained = run(tmp_path, optimizer=averaging, epochs=4, swa_start="0.5 of run", callbacks=[seen])
    half = len(seen.after) // 2
    assert len(seen.after) == 28
    for i, average in enumerate(trained.weights()):
        mean = np.mean([weights[i] for weights in seen.after[half:]], axis=0)
        np.testing.assert_allclose(average, mean, rtol=1e-5, atol=1e-6)
        assert np.abs(average - seen.after[-1][i]).max() > 1e-4


@pytest.mark.slow
def test_a_run_that_resumes_ends_with_the_same_bits(tmp_path: pathlib.Path) -> None:
    settings: dict[str, Any] = {"optimizer": averaging, "epochs": 4, "deterministic": True, "swa_start": 10}
    whole = run(tmp_path / "whole", **settings)
    run(tmp_path / "cut", **settings, stop_after_epochs=2)
    assert run(tmp_path / "cut", **settings).bits() == whole.bits()
    assert run(tmp_path / "plain", **(settings | {"swa_start": None})).bits() != whole.bits()


@pytest.mark.parametrize(
    ("start", "words"),
    [("0.75 of run", "SGD keeps no average of the weights. Write keras.optimizers.SGD.use_ema"), ("75 %", "a length")],
)
def test_what_cannot_be_averaged_is_refused(tmp_path: pathlib.Path, start: str, words: str) -> None:
    failed = run(tmp_path, optimizer=lambda: keras.optimizers.SGD(0.2), swa_start=start, may_fail=True)
    assert isinstance(failed.error, UserError) and words in str(failed.error)
