"""Each reduction of a Keras loss gives `fit`'s own numbers, and the same ones however the batch is cut up."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.tasks.supervised import Supervised
from tfdist.tasks.task import Objective, Task, Term, reduce_terms
from tfdist.training.step.gradients import forward, quotients

N, T = 12, 5
RANDOM = np.random.default_rng(7)
WORDS = np.where(np.arange(T) < RANDOM.integers(1, T + 1, N)[:, np.newaxis], RANDOM.integers(1, 9, (N, T)), 0)
TAGS = np.where(RANDOM.uniform(size=(N, T)) < 0.3, -1, RANDOM.integers(0, 3, (N, T)))
WEIGHTS = RANDOM.uniform(0.0, 2.0, (N, T)).astype(np.float32)
REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", "none")


def tagger(mask: bool) -> keras.Model:
    inputs = keras.Input((T,), dtype="int32")
    x = keras.layers.Embedding(9, 4, mask_zero=mask, embeddings_regularizer="l2")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def in_parts(task: Task, model: keras.Model, examples: Any, cuts: list[int]) -> tuple[float, np.ndarray]:
    """The loss and its gradient by the first variable, of a batch computed in parts and added up."""
    totals: tuple[tf.Tensor, Objective] | None = None
    for first, last in zip([0, *cuts], [*cuts, N], strict=True):
        batch = {"examples": tuple(tf.constant(e[first:last]) for e in examples)}
        with tf.GradientTape() as tape:
            sums = forward(model, task, batch, training=True, num_parts=len(cuts) + 1)
            ((by, numerator),) = sums.numerators.items()
        gradient = tf.convert_to_tensor(tape.gradient(numerator, model.trainable_variables[0].value))
        mine = gradient, sums._replace(numerators={}, outputs=())
        totals = mine if totals is None else tf.nest.map_structure(tf.add, totals, mine)
    gradient, sums = totals
    return float(quotients(sums)[0]), (gradient / sums.divisors[by]).numpy()


@pytest.mark.parametrize("ignores", [False, True], ids=["", "ignore_class"])
@pytest.mark.parametrize("mask", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_reduction_gives_keras_numbers_in_one_part_or_three(
    reduction: str, weighted: bool, mask: bool, ignores: bool
) -> None:
    model = tagger(mask)
    tags = TAGS if ignores else np.abs(TAGS)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=-1 if ignores else None, reduction=reduction
    )
    examples = (WORDS, tags, WEIGHTS) if weighted else (WORDS, tags)
    with tf.GradientTape() as tape:
        theirs = loss(tags, model(WORDS), sample_weight=WEIGHTS if weighted else None) + 0.0
        if reduction == "none":
            theirs = tf.reduce_sum(theirs)  # what a gradient of many numbers is
        theirs += tf.add_n(model.losses)
    gradient = tf.convert_to_tensor(tape.gradient(theirs, model.trainable_variables[0].value)).numpy()
    for cuts in ([], [2, 9]):
        shown, ours = in_parts(Supervised(loss=loss), model, examples, cuts)
        np.testing.assert_allclose(ours, gradient, rtol=0, atol=3e-6 if reduction in ("sum", "none") else 2e-7)
        if reduction != "none":
            assert shown == pytest.approx(float(theirs), rel=2e-6)


def distance(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """One number a batch, and no mean: the square root of a sum."""
    return tf.sqrt(tf.reduce_sum((y_true - y_pred) ** 2))


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("loss", [keras.losses.Dice(), keras.losses.Tversky(), keras.losses.Circle(), distance])
def test_a_loss_of_a_whole_batch_gives_keras_numbers(loss: Any, weighted: bool) -> None:
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(4, activation="sigmoid")(inputs)
    model = keras.Model(inputs, keras.layers.UnitNormalization()(outputs))
    x, weights = RANDOM.normal(size=(N, 3)).astype(np.float32), np.linspace(0.5, 1.5, N, dtype=np.float32)
    y = np.arange(N) % 3 if isinstance(loss, keras.losses.Circle) else RANDOM.uniform(size=(N, 4)).astype(np.float32)
    examples = (x, y, weights) if weighted else (x, y)
    shown, _ = in_parts(Supervised(loss=loss), model, examples, [])
    model.compile(loss=loss)
    theirs = model.evaluate(x, y, N, sample_weight=weights if weighted else None, verbose=0)
    assert shown == pytest.approx(theirs, rel=2e-6)


def test_a_loss_of_a_whole_batch_refuses_microbatches() -> None:
    inputs = keras.Input((T,))
    model = keras.Model(inputs, {"distance": keras.layers.Dense(T)(inputs)})
    batch = {"examples": (WORDS.astype(np.float32), {"distance": WEIGHTS})}
    with pytest.raises(UserError, match=r"'distance' is computed from the whole batch.*num_microbatches = 1"):
        forward(model, Supervised(loss={"distance": distance}), batch, training=True, num_parts=2)


class Given(Task):
    """A task of one's own: the terms that it is made with."""

    def __init__(self, **terms: Term) -> None:
        self._terms = terms

    def inputs(self, examples: Any) -> Any:
        return examples

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term], Any]:
        return self._terms, None


def test_terms_of_ones_own_task_are_weighted_means_and_share_a_divisor_where_they_share_weights() -> None:
    model, weights, values = tagger(False), tf.constant([1.0, 3.0]), tf.constant([2.0, 4.0])
    task = Given(a=Term(values, weights), b=Term(2 * values, weights, coefficient=0.5), c=Term(values))
    model(WORDS[:2])
    sums = forward(model, task, {"examples": WORDS[:2]}, training=True)
    penalty = float(tf.add_n(model.losses))
    loss, terms = quotients(sums)
    assert len(sums.numerators) == 2  # the weights', and the number of rows
    assert {name: float(value) for name, value in terms.items()} == {"a": 3.5, "b": 7.0, "c": 3.0}
    assert float(loss) == pytest.approx(3.5 + 3.5 + 3.0 + penalty)


def test_a_batch_in_which_nothing_counts_has_no_weight_and_the_loss_0() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    batch = {"examples": (WORDS, np.full_like(TAGS, -1))}
    inputs = keras.Input((T,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Embedding(9, 4)(inputs)))
    sums = forward(model, Supervised(loss=loss), batch, training=True)
    (weight,) = sums.weight
    assert (float(weight), float(quotients(sums)[0])) == (0.0, 0.0)


def weight_of(values: list[float], **changes: Any) -> list[float]:
    """What examples with these losses weigh, as the step learns it."""
    given = {"count": tf.constant(2.0), "shares": None, "num_parts": 1, "batch_size": 2, "penalties": [], "added": []}
    added = changes.pop("added", [])
    terms = {"loss": Term(tf.constant(values), **{name: tf.constant(value) for name, value in changes.items()})}
    return [float(w) for w in reduce_terms(terms, **given | {"added": added}).weight]


@pytest.mark.slow
def test_examples_weigh_something_unless_all_weights_are_zero() -> None:
    assert weight_of([1.0, 2.0]) == []  # without weights it is known beforehand
    assert weight_of([1.0, 2.0], weights=[0.0, 0.5]) == [0.5]
    assert weight_of([1.0, 2.0], weights=[1.0, -1.0]) == [2.0]
    assert weight_of([1.0, 2.0], weights=[0.0, 1.0], mask=[True, False]) == [0.0]
    assert weight_of([1.0, 2.0], weights=[0.0, 0.0], added=[tf.constant(1.0)]) == []
