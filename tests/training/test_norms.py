"""Norms of gradients and updates are NumPy's, and change no weight; other strategies: the case `clipnorm`."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import dense_model, digits, embedding_model, words
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from training.trainings import run

from tfdist.errors import UserError
from tfdist.training.step import gradients

pytestmark = pytest.mark.slow
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


def by_hand(start: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients and updates of the one step."""
    model = beginning_with(start)
    images, labels = digits(64)
    values = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, model(images))
    gradients = [g.numpy() for g in tape.gradient(loss, values)]
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    return gradients, [-0.5 * g * min(1.0, 0.1 / norm) for g in gradients]


def norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in arrays)))


def test_norms_are_those_of_numpy(tmp_path: pathlib.Path) -> None:
    start = dense_model().get_weights()
    model = functools.partial(beginning_with, start)
    groups = ["kernel$", "bias$"]
    found = run(tmp_path / "a", **ONE_STEP, model=model, log_norms=groups)
    (point,) = found.points("train")
    expected_gradients, updates = by_hand(start)
    chosen = {"": range(4), "/kernel$": (0, 2), "/bias$": (1, 3)}
    for group, places in chosen.items():
        expected = {
            "gradient_norm": norm([expected_gradients[i] for i in places]),
            "update_norm": norm([updates[i] for i in places]),
        }
        for name, value in expected.items():
            assert point[f"{name}{group}"] == pytest.approx(value, rel=1e-4)
    assert point["update_ratio/kernel$"] == pytest.approx(
        norm([updates[0], updates[2]]) / norm([start[0], start[2]]), rel=1e-4
    )
    assert point["clipped"] == 1.0
    without = run(tmp_path / "b", **ONE_STEP, model=model)
    assert found.bits() == without.bits()


def test_tensorboard_shows_how_gradients_are_spread_as_numpy_counts_them(tmp_path: pathlib.Path) -> None:
    start = dense_model().get_weights()
    model = functools.partial(beginning_with, start)
    found = run(tmp_path / "a", **ONE_STEP, model=model, summaries=["gradients"])
    gradients, _ = by_hand(start)
    shown = EventAccumulator(str(tmp_path / "a" / "tensorboard" / "train"), size_guidance={"tensors": 0}).Reload()
    tags = [tag for tag in shown.Tags()["tensors"] if tag.startswith("gradients/")]
    for tag, gradient in zip(tags, gradients, strict=True):
        (event,) = shown.Tensors(tag)
        left, right, counts = make_ndarray(event.tensor_proto).T
        expected, edges = np.histogram(gradient, 30)
        np.testing.assert_allclose([*left, right[-1]], edges, rtol=1e-4, atol=1e-6)
        # Both round at the edges of bins in their own way.
        assert counts.sum() == gradient.size and np.abs(counts - expected).sum() <= max(4, 0.01 * gradient.size)
        assert shown.SummaryMetadata(tag).plugin_data.plugin_name == "histograms"
    assert found.bits() == run(tmp_path / "b", **ONE_STEP, model=model).bits()


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_layers_without_a_gradient_are_told(tmp_path: pathlib.Path, precision: str) -> None:
    def model() -> keras.Model:
        inputs = keras.Input((64,))
        dead = keras.layers.Dense(4, "relu", bias_initializer=keras.initializers.Constant(-1e3), name="dead")(inputs)
        both = keras.layers.Concatenate()([inputs, dead])
        return keras.Model(inputs, keras.layers.Dense(10, name="alive")(both))

    changes: dict[str, Any] = {"eval_data": None, "epochs": 4, "log_norms": "layers", "steps_per_call": 1}
    found = run(tmp_path, model=model, precision=precision, **changes)
    (told,) = found.events("gradient_is_zero")
    assert told["details"]["group"] == "dead" and told["step"] == 20
    last = found.points("train")[-1]
    assert last["gradient_norm/dead"] == 0 < last["gradient_norm/alive"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("some", "train.log_norms is 'some'; write 'all', 'layers' or a list of patterns"),
        (["kernle"], "train.log_norms names 'kernle', which matches no variable"),
    ],
)
def test_a_mistake_is_one_message(tmp_path: pathlib.Path, given: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        run(tmp_path, log_norms=given)
    assert words in str(caught.value)


@pytest.mark.parametrize("xla", ["off", "update", "on"])
def test_rows_that_come_several_times_are_added_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, xla: str
) -> None:
    """A large embedding's gradient comes as rows; what XLA compiles adds them up in the update alone."""
    settings = ONE_STEP | {
        "model": lambda: embedding_model(70_016),
        "train_data": lambda: words(64),  # each of them some times in a batch
        "optimizer": lambda: keras.optimizers.Adam(3e-3),
        "log_norms": "all",
        "xla": xla,
    }
    rows = run(tmp_path / "rows", **settings)
    monkeypatch.setattr(gradients, "SPARSE_FROM_ELEMENTS", 2**40)
    dense = run(tmp_path / "dense", **settings)
    for ours, theirs in zip(rows.weights(), dense.weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert rows.points("train")[-1]["gradient_norm"] == pytest.approx(
        dense.points("train")[-1]["gradient_norm"], rel=1e-5
    )
