"""The optimizer gets gradients that are summed already, and must not sum them once more; their norm is NumPy's."""

from __future__ import annotations

import functools
import pathlib
import traceback
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import dense_model, digits, embedding_model, sgd, words
from equivalence.runs import assert_close
from mistakes import each_is_refused
from support import REPOSITORY
from training.trainings import run

from tfdist.keras_patches.patches import Patches
from tfdist.training.step import gradients
from tfdist.training.step.optimizer import build_optimizer


def test_from_train_to_the_update_are_nine_calls(tmp_path: pathlib.Path) -> None:
    """Who reads the code from `experiment.train` on meets so many functions; a change that adds one has a reason."""
    calls: list[str] = []

    class Watching(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            frames = traceback.extract_stack()
            calls[:] = [each.name for each in frames if each.filename.startswith(str(REPOSITORY / "tfdist"))]
            return super().apply(grads, trainable_variables)

    run(tmp_path, optimizer=lambda: Watching(0.1), epochs=1, deterministic=False)
    trainer = ["train", "train", "run", "_call"]
    assert calls == [*trainer, "_run", "step", "_on_batch", "__call__", "run"]


@pytest.mark.slow
def test_a_schedule_is_traced_once_for_all_variables(tmp_path: pathlib.Path) -> None:
    traced: list[int] = []

    class Falling(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> tf.Tensor:
            if tf.inside_function():
                traced.append(1)
            return 0.1 / (1.0 + tf.cast(step, tf.float32))

    def deep() -> keras.Model:
        inputs = x = keras.Input((64,))
        for _ in range(5):
            x = keras.layers.Dense(8, "tanh")(x)
        return keras.Model(inputs, keras.layers.Dense(10)(x))

    counts = []
    for name, model in (("shallow", dense_model), ("deep", deep)):
        traced.clear()
        run(tmp_path / name, model=model, optimizer=lambda: keras.optimizers.AdamW(Falling()), epochs=1, eval_data=None)
        counts.append(len(traced))
    assert counts[0] == counts[1] > 0


test_what_is_no_builder_of_an_optimizer_gives_a_message = each_is_refused(
    lambda builder: build_optimizer(builder, dense_model(), Patches()),
    (keras.optimizers.SGD(), "Write @keras.optimizers.SGD without parentheses"),
    ("adm", "train.optimizer is 'adm'.*Did you mean 'adam'"),
    (3, "train.optimizer is 3"),
    (keras.losses.MeanSquaredError(), "train.optimizer is .*MeanSquaredError; write @keras.optimizers.Adam"),
    (lambda: "adam", "train.optimizer gave a str"),
    (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "train.precision = 'float16'"),
    (
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
        "SGD.gradient_accumulation_steps is 3.*train.num_microbatches = 3",
    ),
)


ONE_STEP: dict[str, Any] = {
    "train_data": lambda: digits(64),
    "eval_data": None,
    "epochs": 1,
    "shuffle": False,
    "deterministic": True,
    "optimizer": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
}


def beginning_with(weights: list[np.ndarray]) -> keras.Model:
    model = dense_model()
    model.set_weights(weights)
    return model


def norm_by_hand(start: list[np.ndarray]) -> float:
    """Of the gradients of the one step."""
    model = beginning_with(start)
    images, labels = digits(64)
    values = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, model(images))
    return float(np.sqrt(sum((g.numpy().astype(np.float64) ** 2).sum() for g in tape.gradient(loss, values))))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_norm_is_that_of_numpy(tmp_path: pathlib.Path, precision: str) -> None:
    start = dense_model().get_weights()
    settings = ONE_STEP | {"model": functools.partial(beginning_with, start), "precision": precision}
    found = run(tmp_path / "a", **settings, log_gradient_norm=True)
    (point,) = found.points("train")
    assert point["gradient_norm"] == pytest.approx(norm_by_hand(start), rel=1e-4 if precision == "float32" else 1e-2)
    without = run(tmp_path / "b", **settings)
    assert found.bits() == without.bits() and "gradient_norm" not in without.points("train")[0]


@pytest.mark.slow
@pytest.mark.parametrize("xla", ["off", "update", "on"])
def test_rows_that_come_several_times_are_added_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, xla: str
) -> None:
    """A large embedding's gradient comes as rows; what XLA compiles adds them up in the update alone."""
    settings = ONE_STEP | {
        "model": lambda: embedding_model(70_016),
        "train_data": lambda: words(64),  # each of them some times in a batch
        "optimizer": lambda: keras.optimizers.Adam(3e-3),
        "log_gradient_norm": True,
        "xla": xla,
    }
    rows = run(tmp_path / "rows", **settings)
    monkeypatch.setattr(gradients, "SPARSE_FROM_ELEMENTS", 2**40)
    dense = run(tmp_path / "dense", **settings)
    assert_close(rows.weights(), dense.weights(), tolerance=1e-6)
    assert rows.points("train")[-1]["gradient_norm"] == pytest.approx(
        dense.points("train")[-1]["gradient_norm"], rel=1e-5
    )


# Stochastic weight averaging; test_resume.py holds that a resumed run has the same


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
    averaged = functools.partial(keras.optimizers.SGD, 0.2, use_ema=True, ema_momentum=0.9)
    settings = {"model": functools.partial(dense_model, batch_norm=True), "optimizer": averaged}
    settings |= {"shuffle": False, "deterministic": True}
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
