"""Tasks beside `Supervised`: their losses by hand, and what they refuse."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import sparse_loss, two_output_model, two_outputs
from equivalence.runs import assert_same_bits
from mistakes import call, each_is_refused
from tasks.test_supervised import evaluated
from training.trainings import run

from tfdist.data.sources.arrays import ArraySource
from tfdist.tasks.adversarial import Adversarial
from tfdist.tasks.contrastive import Contrastive
from tfdist.tasks.distillation import Distillation
from tfdist.tasks.language import LanguageModel
from tfdist.tasks.multi_task import UncertaintyWeighted
from tfdist.training.loop.learner import build_model
from tfdist.training.step.gradients import forward, quotients

N = 12
RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(N, 6)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, N).astype(np.int32)


def scores(units: int = 4, **layer: Any) -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, "tanh", name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(units, **layer)(hidden))


def softmax(values: np.ndarray) -> np.ndarray:
    shifted = np.exp(values - values.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return -np.log(softmax(logits)[np.arange(len(labels)), labels])


@pytest.mark.slow
@pytest.mark.parametrize("count", [N, 9], ids=["", "mask"])
@pytest.mark.parametrize("from_logits", [True, False])
def test_distillation_is_its_formula(tmp_path: pathlib.Path, from_logits: bool, count: int) -> None:
    activation, path = None if from_logits else "softmax", str(tmp_path / "taught.keras")
    taught, model = scores(activation=activation), scores(activation=activation)
    taught.save(path)
    model = model if count == N else keras.Sequential([keras.Input((6,)), keras.layers.Masking(), model])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    settings = {"temperature": 3.0, "soft": 0.7, "from_logits": from_logits}
    task = Distillation(teacher=path, loss=loss, metrics=["accuracy"], **settings)
    found = evaluated(task, model, (np.where(np.arange(N)[:, np.newaxis] < count, ROWS, 0), LABELS))
    given, theirs = (np.asarray(each(ROWS[:count])) for each in (model, taught))
    if not from_logits:
        given, theirs = np.log(given), np.log(theirs)
    ours, target = softmax(given / 3.0), softmax(theirs / 3.0)
    hard = cross_entropy(given, LABELS[:count]).mean()
    soft = 9.0 * (target * np.log(target / ours)).sum(axis=-1).mean()
    np.testing.assert_allclose([found["hard_loss"], found["soft_loss"]], [hard, soft], rtol=1e-4)
    np.testing.assert_allclose(found["loss"], 0.3 * hard + 0.7 * soft, rtol=1e-4)


@pytest.mark.slow
def test_a_teacher_is_no_part_of_what_is_trained_or_exported(tmp_path: pathlib.Path) -> None:
    model, teacher = scores(), str(tmp_path / "teacher.keras")
    model.save(teacher)
    trained = run(
        tmp_path / "run",
        model=scores,
        train_data=lambda: (ROWS, LABELS),
        eval_data=None,
        global_batch_size=4,
        task=lambda: Distillation(teacher=teacher, loss=sparse_loss()),
    )
    assert len(trained.exported().weights) == 4
    assert_same_bits(keras.models.load_model(teacher).get_weights(), model.get_weights())
    assert {"hard_loss", "soft_loss"} <= set(trained.points("train")[0])


@pytest.mark.slow
def test_contrastive_is_the_cross_entropy_of_finding_the_other_view() -> None:
    views = {"first": ROWS, "second": ROWS + 0.1 * RANDOM.normal(size=ROWS.shape).astype(np.float32)}
    model = scores()
    found = evaluated(Contrastive(temperature=0.5), model, views)
    rows = np.concatenate([np.asarray(model(views[name])) for name in ("first", "second")])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    expected = []
    for i in range(2 * N):
        others = [j for j in range(2 * N) if j != i]
        similar = rows[i] @ rows[others].T / 0.5
        expected.append(cross_entropy(similar[np.newaxis], np.array([others.index((i + N) % (2 * N))]))[0])
    assert found["loss"] == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.slow
def test_one_step_of_an_attack_goes_along_the_sign_of_the_gradient() -> None:
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(4)(inputs))
    task = Adversarial(epsilon=0.3, share=0.25, bounds=(-1.0, 1.0), loss=sparse_loss(), metrics=["accuracy"])
    rows = np.clip(ROWS, -1, 1)
    found = evaluated(task, model, (rows, LABELS))
    kernel, bias = model.get_weights()
    gradient = (softmax(rows @ kernel + bias) - np.eye(4)[LABELS]) @ kernel.T
    changed = np.clip(rows + 0.3 * np.sign(gradient), -1, 1)
    clean, attacked = (cross_entropy(x @ kernel + bias, LABELS).mean() for x in (rows, changed))
    np.testing.assert_allclose([found["output_loss"], found["adversarial_output_loss"]], [clean, attacked], rtol=1e-4)
    np.testing.assert_allclose(found["loss"], 0.75 * clean + 0.25 * attacked, rtol=1e-4)
    hits = [(np.argmax(x @ kernel + bias, axis=1) == LABELS).mean() for x in (rows, changed)]
    np.testing.assert_allclose([found["accuracy"], found["adversarial_accuracy"]], hits, rtol=1e-5)


@pytest.mark.slow
def test_several_steps_of_an_attack_stay_within_the_radius_and_find_more() -> None:
    model = scores()
    losses = []
    for steps in (1, 8):
        task = Adversarial(epsilon=0.3, steps=steps, loss=sparse_loss())
        losses.append(evaluated(task, model, (ROWS, LABELS))["adversarial_output_loss"])
        changed = task._attack(model, tf.constant(ROWS), [tf.constant(LABELS)])
        assert np.abs(changed - ROWS).max() <= 0.3 + 1e-6
    assert losses[1] > losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("squared", [keras.losses.MeanSquaredError(), "mse"], ids=["class", "name"])
def test_learned_weights_of_losses_are_their_formula_and_move(tmp_path: pathlib.Path, squared: Any) -> None:
    losses = {"digit": sparse_loss(), "odd": squared}
    task = UncertaintyWeighted(loss=losses, loss_weights={"odd": 2.0})
    model = two_output_model()
    examples = two_outputs()[:2]
    build_model(lambda: model, task, ArraySource(examples).structure)
    model.log_variances.values.assign([0.4, -0.6])
    batch = tf.nest.map_structure(tf.constant, examples)
    loss, terms = quotients(forward(model, task, {"examples": batch}, training=False))
    penalty = float(tf.add_n(model.losses))
    by_hand = np.exp(-0.4) * terms["digit"] + 2.0 * 0.5 * np.exp(0.6) * terms["odd"] + 0.5 * (0.4 - 0.6) + penalty
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-5)
    trained = run(
        tmp_path / "run",
        model=two_output_model,
        train_data=two_outputs,
        eval_data=None,
        task=lambda: UncertaintyWeighted(loss=losses),
    )
    assert np.abs(trained.model.log_variances.values.numpy()).min() > 1e-3
    assert len(trained.exported().weights) == len(trained.model.weights) - 1


@pytest.mark.slow
def test_perplexity_is_e_to_the_mean_cross_entropy_of_what_counts() -> None:
    inputs = keras.Input((5,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Embedding(7, 7)(inputs))
    tokens = RANDOM.integers(0, 7, (N, 5)).astype(np.int32)
    weights = RANDOM.integers(0, 2, (N, 5)).astype(np.float32)
    found = evaluated(LanguageModel(), model, (tokens, tokens, weights))
    each = cross_entropy(np.asarray(model(tokens)).reshape(-1, 7), tokens.ravel()).reshape(N, 5)
    mean = (each * weights).sum() / weights.sum()
    assert found["loss"] == pytest.approx(mean, rel=1e-4)
    assert found["perplexity"] == pytest.approx(np.exp(mean), rel=1e-4)


test_what_does_not_fit_is_one_message = each_is_refused(
    call,
    (lambda: Distillation(teacher="", loss="mse"), "Distillation.teacher is ''"),
    (lambda: Distillation(teacher="t", temperature=0, loss="mse"), "Distillation.temperature is 0"),
    (lambda: Distillation(teacher="t", soft=2, loss="mse"), "Distillation.soft is 2"),
    (
        lambda: evaluated(Distillation(teacher="no/such", loss=sparse_loss()), scores(), (ROWS, LABELS)),
        "There is no teacher at no/such/export/model.keras",
    ),
    (lambda: Contrastive(temperature=-1), "Contrastive.temperature is -1"),
    (lambda: evaluated(Contrastive(), scores(), (ROWS, LABELS)), "Write @drawn.TwoViews"),
    (lambda: Adversarial(epsilon=0, loss="mse"), "Adversarial.epsilon is 0"),
    (lambda: Adversarial(epsilon=1, steps=0, loss="mse"), "Adversarial.steps is 0"),
    (lambda: Adversarial(epsilon=1, bounds=(1, 0), loss="mse"), "Adversarial.bounds is (1, 0)"),
    (lambda: Adversarial(epsilon=1, share=1.5, loss="mse"), "Adversarial.share is 1.5"),
    (lambda: UncertaintyWeighted(loss="mse"), "for one output use Supervised"),
)
