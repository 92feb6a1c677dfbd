"""Losses and metrics are Keras's own numbers; mistakes get a message, and a model's own steps beside a task, too."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import digits
from mistakes import each_is_refused
from training.trainings import run
from unequal_experiments import NextValue

from tfdist.data.sources.arrays import ArraySource
from tfdist.errors import UserError
from tfdist.serving.inputs import name_outputs
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Prediction, Supervised, Unweighted, Weighted
from tfdist.tasks.task import Task
from tfdist.training.loop.learner import build_model, check_fit
from tfdist.training.run.compiled import parts_of
from tfdist.training.step.gradients import forward, quotients
from tfdist.training.step.metrics import MetricGroup

N, T = 12, 5
RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(N, 6)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, N)
WORDS = np.where(np.arange(T) < RANDOM.integers(1, T + 1, N)[:, np.newaxis], RANDOM.integers(1, 9, (N, T)), 0)
TAGS = RANDOM.integers(0, 3, (N, T))
WEIGHTS = RANDOM.uniform(0.0, 2.0, N).astype(np.float32)
STEP_WEIGHTS = RANDOM.uniform(0.0, 2.0, (N, T)).astype(np.float32)
MASK = WORDS != 0


def evaluated(task: Task, model: keras.Model, examples: Any, *, compiled: bool = False) -> dict[str, float]:
    """Loss, terms and metrics of one batch, as the step and the evaluation put them together."""
    strategy = OneDevice()
    strategy.connect()
    source = ArraySource(examples)
    build_model(lambda: model, task, source.structure)
    metrics = MetricGroup(task.metric_specs())
    check_fit(model, task, source.structure, [metrics])

    def compute(batch: dict[str, Any]) -> dict[str, tf.Tensor]:
        objective = forward(model, task, batch, training=False)
        loss, terms = quotients(objective)
        shown = {f"{name}_loss": terms[name] for name in task.term_names()}
        return {"loss": loss, "outputs": objective.outputs} | shown

    batch = {"examples": source.gatherer()(tf.range(source.num_examples))}
    results = tf.function(compute, jit_compile=compiled)(batch)
    task.update_metrics(metrics.metrics, batch["examples"], results.pop("outputs"), None)
    return {name: float(value) for name, value in (results | metrics.read(strategy)[0]).items()}


def by_keras(model: keras.Model, x: Any, y: Any, **settings: Any) -> dict[str, float]:
    model.compile(**settings)
    return model.evaluate(x, y, batch_size=N, verbose=0, return_dict=True)


def model_of(*outputs: keras.layers.Layer) -> keras.Model:
    inputs = keras.Input((6,))
    made = {layer.name: layer(inputs) for layer in outputs}
    return keras.Model(inputs, made if len(made) > 1 else next(iter(made.values())))


def tagger(*, masked: bool) -> keras.Model:
    inputs = keras.Input((T,), dtype="int32")
    x = keras.layers.Embedding(9, 4, mask_zero=masked)(inputs)
    if masked:
        x = keras.layers.LSTM(5, return_sequences=True)(x)
    return keras.Model(inputs, keras.layers.TimeDistributed(keras.layers.Dense(3))(x))


def losses_of(model: keras.Model, x: Any, y: np.ndarray) -> np.ndarray:
    logits = tf.cast(model(x), tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits).numpy()


def sparse() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


ONE_HOT = np.eye(4, dtype=np.float32)[LABELS]
SINGLE: dict[str, tuple[Callable[[], keras.Model], np.ndarray, Callable[[], Any], list[Any]]] = {
    "sparse": (
        lambda: model_of(keras.layers.Dense(4)),
        LABELS,
        sparse,
        [keras.metrics.SparseCategoricalAccuracy, lambda: keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
    ),
    "smoothed": (
        lambda: model_of(keras.layers.Dense(4, activation="softmax")),
        ONE_HOT,
        lambda: keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        [keras.metrics.CategoricalAccuracy, lambda: keras.metrics.AUC(name="auc")],
    ),
    "f1": (
        lambda: model_of(keras.layers.Dense(4, activation="softmax")),
        ONE_HOT,
        keras.losses.CategoricalCrossentropy,
        [lambda: keras.metrics.F1Score(average="macro", name="f1"), lambda: keras.metrics.R2Score(name="r2")],
    ),
    "binary_flat_targets": (
        lambda: model_of(keras.layers.Dense(1)),
        (LABELS % 2).astype(np.float32),
        lambda: keras.losses.BinaryCrossentropy(from_logits=True),
        [lambda: keras.metrics.BinaryAccuracy(threshold=0.0)],
    ),
    "regression_integer_targets": (
        lambda: model_of(keras.layers.Dense(1)),
        LABELS,
        keras.losses.MeanSquaredError,
        [keras.metrics.MeanAbsoluteError, keras.metrics.RootMeanSquaredError],
    ),
    "several_columns": (
        lambda: model_of(keras.layers.Dense(6)),
        ROWS * 2,
        lambda: keras.losses.Huber(0.3),
        [keras.metrics.CosineSimilarity],
    ),
    "regularized": (
        lambda: model_of(keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")),
        LABELS,
        sparse,
        [],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SINGLE)
def test_a_single_output_gives_keras_numbers(name: str) -> None:
    build, y, loss, metrics = SINGLE[name]
    model = build()
    ours = evaluated(Supervised(loss=loss(), metrics=metrics), model, (ROWS, y))
    assert ours == pytest.approx(by_keras(model, ROWS, y, loss=loss(), metrics=[m() for m in metrics]), abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "y", "loss", "metrics"),
    [
        (4, LABELS, "crossentropy", ["acc"]),
        (4, ONE_HOT, "categorical_crossentropy", ["accuracy", "mse"]),
        (1, (LABELS % 2).astype(np.float32)[:, np.newaxis], "crossentropy", ["acc"]),
    ],
)
def test_names_mean_what_compile_makes_of_them(units: int, y: np.ndarray, loss: str, metrics: list[str]) -> None:
    model = model_of(keras.layers.Dense(units, activation="softmax" if units > 1 else "sigmoid"))
    ours = evaluated(Supervised(loss=loss, metrics=metrics), model, (ROWS, y))
    assert ours == pytest.approx(by_keras(model, ROWS, y, loss=loss, metrics=metrics), abs=2e-6)


@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_weights_of_examples_multiply_losses_whose_sum_is_divided_by_the_number_of_rows(shape: tuple[int, ...]) -> None:
    model = model_of(keras.layers.Dense(4))
    task = Supervised(loss=sparse(), metrics=[keras.metrics.SparseCategoricalAccuracy])
    ours = evaluated(task, model, (ROWS, LABELS, WEIGHTS.reshape(shape)))
    losses = losses_of(model, ROWS, LABELS)
    hits = np.argmax(model(ROWS), -1) == LABELS
    assert ours["loss"] == pytest.approx((WEIGHTS * losses).sum() / N, abs=1e-6)
    assert ours["sparse_categorical_accuracy"] == pytest.approx((WEIGHTS * hits).sum() / WEIGHTS.sum(), abs=1e-6)


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", [WEIGHTS, STEP_WEIGHTS, None], ids=["by example", "by step", "none"])
def test_what_a_mask_leaves_out_counts_neither_in_the_loss_nor_in_the_metrics(
    weights: np.ndarray | None, masked: bool
) -> None:
    model, mask = tagger(masked=masked), MASK if masked else np.ones((N, T))
    examples = (WORDS, TAGS) if weights is None else (WORDS, TAGS, weights)
    full = mask * (np.ones((N, T)) if weights is None else np.broadcast_to(weights.reshape(N, -1), (N, T)))
    task = Supervised(loss=sparse(), metrics=[keras.metrics.SparseCategoricalAccuracy])
    ours = evaluated(task, model, examples, compiled=masked and weights is STEP_WEIGHTS)  # XLA keeps a mask, too
    hits = np.argmax(model(WORDS), -1) == TAGS
    assert ours["loss"] == pytest.approx((full * losses_of(model, WORDS, TAGS)).sum() / mask.sum(), abs=1e-6)
    assert ours["sparse_categorical_accuracy"] == pytest.approx((full * hits).sum() / full.sum(), abs=1e-6)
    if weights is None:
        assert ours["loss"] == pytest.approx(by_keras(model, WORDS, TAGS, loss=sparse())["loss"], abs=1e-6)


def two_outputs() -> keras.Model:
    return model_of(keras.layers.Dense(4, name="label"), keras.layers.Dense(1, name="odd", kernel_regularizer="l2"))


def two_losses() -> dict[str, Any]:
    return {"label": sparse(), "odd": keras.losses.BinaryCrossentropy(from_logits=True)}


TARGETS = {"label": LABELS, "odd": (LABELS % 2).astype(np.float32)[:, np.newaxis]}


def test_each_output_has_weights_of_its_own() -> None:
    model, other = two_outputs(), WEIGHTS[::-1].copy()
    ours = evaluated(Supervised(loss=two_losses()), model, (ROWS, TARGETS, {"label": WEIGHTS, "odd": other}))
    outputs = model(ROWS)
    label = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=LABELS, logits=outputs["label"]).numpy()
    odd = tf.nn.sigmoid_cross_entropy_with_logits(labels=TARGETS["odd"], logits=outputs["odd"]).numpy()[:, 0]
    assert ours["label_loss"] == pytest.approx((WEIGHTS * label).sum() / N, abs=1e-6)
    assert ours["odd_loss"] == pytest.approx((other * odd).sum() / N, abs=1e-6)
    only_one = evaluated(Supervised(loss=two_losses()), two_outputs(), (ROWS, TARGETS, {"label": WEIGHTS}))
    assert np.isfinite(only_one["loss"])
    for_all = evaluated(Supervised(loss=two_losses()), model, (ROWS, TARGETS, WEIGHTS))
    named = evaluated(Supervised(loss=two_losses()), model, (ROWS, TARGETS, {"label": WEIGHTS, "odd": WEIGHTS}))
    assert for_all == pytest.approx(named, abs=1e-6)


@pytest.mark.parametrize("build", [keras.metrics.AUC, keras.metrics.BinaryIoU, keras.metrics.MeanAbsoluteError])
def test_a_metric_of_whatever_shape_leaves_out_the_rows_of_other_replicas(build: Any) -> None:
    task, (metric, expected) = Supervised(loss="mse", metrics=[build]), (build(), build())
    y, p = (RANDOM.uniform(size=(3, 5, 2)).round(digits).astype(np.float32) for digits in (0, 3))

    def update(y: tf.Tensor, p: tf.Tensor, shares: tf.Tensor) -> None:
        task.update_metrics([metric], (None, y), {"output": Prediction(p, None)}, shares)

    rows = tf.TensorSpec([None, 5, 2])
    updating = tf.function(update, input_signature=[rows, rows, tf.TensorSpec([None])])
    updating(y, p, np.array([1, 0, 1], np.float32))
    updating(y, p, np.zeros(3, np.float32))
    expected.update_state(y[::2], p[::2])
    assert float(metric.result()) == pytest.approx(float(expected.result()), abs=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_crossentropy_among_the_metrics_goes_by_logits(compiled: bool) -> None:
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(4, "softmax", kernel_initializer=keras.initializers.RandomNormal(stddev=100.0))(inputs)
    model = keras.Model(inputs, outputs)
    loss, metrics = "sparse_categorical_crossentropy", [keras.metrics.SparseCategoricalCrossentropy(name="metric")]
    ours = evaluated(
        Supervised(loss=loss, metrics=["sparse_categorical_crossentropy"]), model, (ROWS, LABELS), compiled=compiled
    )
    theirs = by_keras(model, ROWS, LABELS, loss=loss, metrics=metrics)
    assert (
        ours["sparse_categorical_crossentropy"] == pytest.approx(theirs["metric"], rel=1e-5) and theirs["metric"] > 50
    )


@pytest.mark.parametrize("kind", [Unweighted, Weighted])
def test_a_masked_metric_counts_a_replicas_share_of_each_example(kind: type[Weighted]) -> None:
    task = Supervised(loss="mse", metrics=[kind(lambda: keras.metrics.MeanAbsoluteError())])
    metric, shares = keras.metrics.MeanAbsoluteError(), tf.constant([1.0, 0.5])
    values, mask = [[[1.0], [9.0], [2.0]], [[3.0], [9.0], [6.0]]], [[True, False, True]] * 2
    outputs = {"output": Prediction(tf.constant(values), tf.constant(mask))}
    task.update_metrics([metric], (None, tf.zeros((2, 3, 1))), outputs, shares)
    assert float(metric.result()) == pytest.approx((1.0 + 2.0 + 0.5 * (3.0 + 6.0)) / 3.0)


@pytest.mark.slow
def test_a_sequence_beside_another_output_may_have_weights_of_steps_and_a_mask() -> None:
    inputs = keras.Input((T,), dtype="int32")
    x = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
    outputs = {"tags": keras.layers.Dense(3)(x), "label": keras.layers.Dense(4)(keras.layers.LSTM(3)(x))}
    model = keras.Model(inputs, outputs)
    task = Supervised(loss={"tags": sparse(), "label": sparse()})
    ours = evaluated(task, model, (WORDS, {"tags": TAGS, "label": LABELS}, {"tags": STEP_WEIGHTS}))
    losses = losses_of(lambda x: model(x)["tags"], WORDS, TAGS)
    weights = STEP_WEIGHTS * MASK
    assert ours["tags_loss"] == pytest.approx((weights * losses).sum() / MASK.sum(), abs=1e-6)

    unmasked = keras.Input((T,), dtype="int32")
    x = keras.layers.Embedding(9, 4)(unmasked)
    model = keras.Model(unmasked, {"tags": keras.layers.Dense(3)(x), "label": keras.layers.Dense(4)(x[:, 0])})
    ours = evaluated(task, model, (WORDS, {"tags": TAGS, "label": LABELS}, {"tags": STEP_WEIGHTS}))
    losses = losses_of(lambda x: model(x)["tags"], WORDS, TAGS)
    assert ours["tags_loss"] == pytest.approx((STEP_WEIGHTS * losses).sum() / (N * T), abs=1e-6)


def test_a_key_more_than_the_model_has_inputs_is_refused() -> None:
    b, c = keras.Input((6,)), keras.Input((6,))
    model = keras.Model({"b": b, "c": c}, keras.layers.Dense(4)(keras.layers.Concatenate()([b, 2 * c])))
    task, x = Supervised(loss=sparse()), {"b": ROWS, "c": ROWS}
    assert set(evaluated(task, model, (x, LABELS))) == {"loss"}
    with pytest.raises(UserError, match=r"gives .* 'aaa', 'b', 'c', and it takes 'b', 'c'\. Leave 'aaa' out of x"):
        evaluated(task, model, (x | {"aaa": ROWS}, LABELS))


def test_two_outputs_of_one_name_are_refused_wherever_outputs_are_named() -> None:
    inputs, head = [keras.Input((4,)), keras.Input((4,))], keras.layers.Dense(1, name="head")
    model = keras.Model(inputs, [head(each) for each in inputs])
    x, y = [ROWS[:, :4], ROWS[:, :4]], np.ones((N, 1), np.float32)
    refusal = r"2 outputs of the model are called 'head'.*keras\.layers\.Identity\(name="
    with pytest.raises(UserError, match=refusal):
        evaluated(Supervised(loss={"head": "mse"}), model, (x, {"head": y}))
    with pytest.raises(UserError, match=refusal):
        name_outputs(model, x)
    model.compile("sgd", ["mse", "mae"])
    structure = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), (x, (y, y)))
    with pytest.raises(UserError, match=refusal):
        parts_of(None, lambda: model, None, None, structure)


def squared(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """As for `compile`, which hands over floats, and targets as wide as the outputs."""
    return tf.reduce_mean((y_true - y_pred) ** 2, axis=-1)


class Squared(keras.losses.Loss):
    """As a user writes it: targets come as floats, as in Keras's own `fit`."""

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((y_true[:, tf.newaxis] - y_pred) ** 2, axis=-1)


@pytest.mark.parametrize("loss", [squared, Squared()], ids=["function", "class"])
def test_a_users_own_loss_is_taken(loss: Any) -> None:
    model = model_of(keras.layers.Dense(1))
    ours = evaluated(Supervised(loss=loss), model, (ROWS, LABELS))
    assert ours["loss"] == pytest.approx(np.mean((LABELS - model(ROWS).numpy()[:, 0]) ** 2), rel=1e-6)
    assert ours["loss"] == pytest.approx(by_keras(model, ROWS, LABELS, loss=loss)["loss"], rel=1e-6)


class OfRows(Squared):
    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.boolean_mask(super().call(y_true, y_pred), y_true > 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_of_another_number_of_values_than_one_a_row_gives_keras_number(reduction: str) -> None:
    model, loss = model_of(keras.layers.Dense(1)), OfRows(reduction=reduction)
    ours = evaluated(Supervised(loss=loss), model, (ROWS, LABELS))
    assert ours["loss"] == pytest.approx(by_keras(model, ROWS, LABELS, loss=loss)["loss"], rel=1e-6)


def test_half_precision_outputs_are_compared_in_float32() -> None:
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(4, dtype="mixed_bfloat16")(inputs))
    assert model(ROWS).dtype == tf.bfloat16
    ours = evaluated(Supervised(loss=sparse()), model, (ROWS, LABELS))
    assert ours["loss"] == pytest.approx(losses_of(model, ROWS, LABELS).mean(), abs=1e-6)


test_wrong_arguments_give_a_message = each_is_refused(
    lambda arguments: Supervised(**arguments),
    ({"loss": "msee"}, "loss is 'msee' for output, and Keras has none.*Did you mean 'mse'"),
    ({"loss": 3}, "loss is 3 for output; write a Keras loss"),
    ({"loss": keras.losses.MeanSquaredError}, "with parentheses"),
    ({"loss": {"label": None}}, "loss is None for label"),
    ({"loss": sparse(), "metrics": "accuracy"}, "write a list"),
    ({"loss": sparse(), "metrics": [3]}, "metrics holds 3"),
    ({"loss": sparse(), "metrics": [keras.metrics.AUC()]}, r"Write @keras\.metrics\.AUC without parentheses"),
    ({"loss": sparse(), "metrics": {"label": []}}, "no loss for the output 'label'"),
    ({"loss": {"label": sparse()}, "metrics": [keras.metrics.AUC]}, "dict of lists by output name"),
    ({"loss": {"label": sparse()}, "metrics": {"lable": []}}, "'lable'.*Did you mean 'label'"),
    ({"loss": {"label": sparse()}, "loss_weights": {"odd": 2.0}}, "no loss for the output 'odd'"),
)


test_data_that_do_not_fit_give_a_message = each_is_refused(
    lambda task, examples: evaluated(task, two_outputs(), examples),
    (Supervised(loss=sparse()), ROWS, "the data gives "),
    (Supervised(loss=sparse()), (ROWS, LABELS, WEIGHTS, WEIGHTS), "the data gives 4 parts"),
    (Supervised(loss=two_losses()), (ROWS, {"label": LABELS}), "The targets are .*'label'.*but there are losses"),
    (Supervised(loss={"digit": sparse()}), (ROWS, {"digit": LABELS}), "outputs are .*'label'.*losses for"),
    (Supervised(loss=two_losses()), (ROWS, [LABELS, LABELS, LABELS]), "targets are a list of 3"),
    (Supervised(loss=two_losses()), (ROWS, TARGETS, [WEIGHTS] * 3), "sample_weight is a list of 3, and there"),
    (Supervised(loss=two_losses()), (ROWS, TARGETS, {"lable": WEIGHTS}), r"sample weights for \['lable'\]"),
    (Supervised(loss=lambda y, p: tf.reduce_mean(p["label"])), (ROWS, LABELS), "outputs are several"),
)


test_a_model_that_does_not_fit_gives_a_message = each_is_refused(
    lambda task, examples: evaluated(task, model_of(keras.layers.Dense(4)), examples),
    (Supervised(loss=sparse()), (ROWS, {"label": LABELS, "other": LABELS}), "targets are several"),
    (Supervised(loss=sparse()), (ROWS, LABELS, np.ones((N, 3))), "sample_weight has the shape"),
    (Supervised(loss=sparse()), (ROWS[:, :3], LABELS), r"do not fit the data.*\n.*float32\[None, 3\]"),
    (
        Supervised(loss=sparse(), metrics=[keras.metrics.CategoricalAccuracy, keras.metrics.F1Score]),
        (ROWS, LABELS),
        "metrics do not fit the data",
    ),
    (Supervised(loss=sparse(), metrics=[squared]), (ROWS, LABELS), "metric squared cannot be built"),
    (Supervised(loss=sparse(), metrics=[lambda: 1.0]), (ROWS, LABELS), "gives a float"),
    (Supervised(loss=sparse(), metrics=[lambda: keras.metrics.AUC(name="loss")]), (ROWS, LABELS), "called 'loss'"),
)


@pytest.mark.parametrize("metric", [keras.metrics.Precision, keras.metrics.SparseCategoricalAccuracy])
def test_the_second_metric_of_a_class_gets_a_name_of_its_own(metric: type[keras.metrics.Metric]) -> None:
    assert len(set(MetricGroup(Supervised(loss=sparse(), metrics=[metric] * 2).metric_specs()).names)) == 2


# A model's own steps


class OwnLossAlone(keras.Sequential):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


class OwnStep(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(10)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        raise AssertionError("never called")


test_what_a_task_would_not_call_is_refused = each_is_refused(
    lambda model, loss, tmp_path: run(tmp_path, model=model, task=lambda: Supervised(loss=loss)),
    (OwnStep, "sparse_categorical_crossentropy", "OwnStep has a train_step of its own.*Leave train.task"),
    (
        lambda: OwnLossAlone([keras.layers.Dense(10)]),
        None,
        "OwnLossAlone has a compute_loss of its own.*Leave train.task",
    ),
    (lambda: keras.Sequential([keras.layers.Dense(10)]), None, "Supervised.loss is not given"),
)


def stateful() -> keras.Model:
    inputs = keras.Input(batch_shape=(64, 64))
    x = keras.layers.LSTM(4, stateful=True)(keras.layers.Reshape((8, 8))(inputs))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def overwriting() -> keras.Model:
    return keras.Sequential([keras.Input((64,)), NextValue(), keras.layers.Dense(10)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (stateful, r"The layer 'lstm.*' is stateful.*cut into 2 parts"),
        (overwriting, r"overwrite_with_gradient.: .*next_value.*/last\. .*into 2 parts"),
    ],
)
def test_what_a_batch_leaves_for_the_next_trains_on_one_device_and_is_refused_in_parts(
    tmp_path: pathlib.Path, model: Callable[[], keras.Model], message: str
) -> None:
    settings = {"model": model, "train_data": lambda: digits(192), "eval_data": None, "epochs": 1}
    assert np.isfinite(run(tmp_path / "one", **settings).result.train_metrics["loss"])
    trained = run(tmp_path / "two", may_fail=True, num_microbatches=2, **settings)
    with pytest.raises(UserError, match=message):
        raise trained.error
