"""The optimizer gets gradients that are summed already, and must not sum them once more."""

from __future__ import annotations

import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from equivalence.cases import dense_model
from support import REPOSITORY
from training.trainings import run

from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches
from tfdist.training.step.optimizer import build_optimizer


def test_keras_still_has_the_private_method_that_is_replaced() -> None:
    """Where this fails, Keras has changed: see what reduces gradients there now, and replace that."""
    method = keras.optimizers.Optimizer._all_reduce_sum_gradients
    weight = tf.Variable(1.0)
    pairs = method(keras.optimizers.SGD(), [(tf.constant(2.0), weight)])
    assert [float(g) for g, _ in pairs] == [2.0]


def test_a_keras_without_it_is_refused_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("keras.src.backend.tensorflow.optimizer.TFOptimizer._all_reduce_sum_gradients")
    with pytest.raises(RuntimeError, match="gradients would be summed twice"):
        build_optimizer(keras.optimizers.SGD, dense_model(), Patches())


def test_from_train_to_the_update_are_eleven_calls(tmp_path: pathlib.Path) -> None:
    """Who reads the code from `experiment.train` on meets so many functions; a change that adds one has a reason."""
    calls: list[str] = []

    class Watching(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            frames = traceback.extract_stack()
            calls[:] = [each.name for each in frames if each.filename.startswith(str(REPOSITORY / "tfdist"))]
            return super().apply(grads, trainable_variables)

    run(tmp_path, optimizer=lambda: Watching(0.1), epochs=1, deterministic=False)
    trainer = ["train", "train", "run", "_call"]
    assert calls == [*trainer, "_run", "step", "_on_batch", "update", "__call__", "run", "apply"]


@pytest.mark.slow
def test_without_the_guard_gradients_are_summed_twice(mirrored: Callable[[str], Any]) -> None:
    assert mirrored("summed_gradients") == {"with": 1.0, "without": 2.0}


def test_clipping_and_moving_averages_of_the_optimizer_still_work() -> None:
    model = dense_model()
    optimizer = build_optimizer(lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0, use_ema=True), model, Patches())
    before = [v.numpy() for v in model.trainable_variables]
    optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
    moved = sum(((v.numpy() - b) ** 2).sum() for v, b in zip(model.trainable_variables, before, strict=True)) ** 0.5
    assert moved == pytest.approx(1.0, rel=1e-5)


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


@pytest.mark.parametrize(
    ("builder", "message"),
    [
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
    ],
)
def test_what_is_no_builder_of_an_optimizer_gives_a_message(builder: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_optimizer(builder, dense_model(), Patches())
