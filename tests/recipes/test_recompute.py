"""Gradient checkpointing takes the same steps: weights, dropout, batch statistics; and what it cannot do it refuses."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from equivalence.runs import assert_close
from mistakes import each_is_refused
from training.trainings import run

import tfdist
from tfdist.models.transformer import PositionEmbedding, TransformerBlock
from tfdist.recipes.recompute import choose_layers


def model(num_blocks: int = 1) -> keras.Model:
    inputs = keras.Input((64,))
    layers = [keras.layers.Dense(64, kernel_regularizer="l2"), keras.layers.BatchNormalization(momentum=0.9)]
    x = keras.Sequential([*layers, keras.layers.Activation("tanh")], name="normalized")(inputs)
    x = keras.layers.Reshape((8, 8))(x)
    for number in range(num_blocks):
        x = TransformerBlock(2, causal=True, dropout=0.2, name=f"block_{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(10, name="head")(keras.layers.Flatten()(x)))


def adding() -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.Sequential([keras.layers.Dense(8, activity_regularizer="l2")], name="adds")(inputs)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


SETTINGS: dict[str, Any] = {"model": model, "eval_data": None, "epochs": 1, "deterministic": True}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"precision": "bfloat16"}, {"precision": "float16"}, {"xla": "on"}], ids=str)
def test_it_takes_the_same_steps(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    plain = run(tmp_path / "plain", **(SETTINGS | changes))
    again = run(tmp_path / "again", **(SETTINGS | changes), recompute=["normalized", "block_0", "head"])
    tolerance = 1e-6 if not changes else 2e-5 if "xla" in changes else 4e-3
    assert_close(again.weights(), plain.weights(), tolerance=tolerance)
    seeds = [[v.numpy() for v in each.model.variables if "seed" in v.path] for each in (again, plain)]
    assert len(seeds[0]) >= 2
    np.testing.assert_array_equal(*seeds)
    assert again.points("train")[0]["loss"] == pytest.approx(plain.points("train")[0]["loss"], abs=tolerance)
    assert "call" not in vars(again.model.get_layer("block_0"))  # as the user made it


def pooled_model(in_block: bool, mask_zero: bool) -> keras.Model:
    """A mask goes through the block, or is made in it."""
    keras.utils.set_random_seed(0)
    inputs, tokens = keras.Input((8,)), keras.Input((8,))
    embedding = keras.layers.Embedding(9, 8, mask_zero=mask_zero)
    within = keras.Model(tokens, embedding(tokens), name="block_0")
    x = within(inputs) if in_block else TransformerBlock(2, causal=False, name="block_0")(embedding(inputs))
    made = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(keras.layers.GlobalAveragePooling1D()(x)))
    made.compile("sgd", "sparse_categorical_crossentropy")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("in_block", [False, True])
def test_masks_of_inputs_and_outputs_stay(in_block: bool) -> None:
    tokens = np.random.default_rng(0).integers(0, 9, (32, 8))
    trained = []
    for mask_zero, changes in ((True, {}), (True, {"recompute": ["block_0"]}), (False, {})):
        made = pooled_model(in_block, mask_zero)
        tfdist.fit(made, tokens, tokens[:, 0] % 3, epochs=2, verbose=0, seed=0, **changes)
        trained.append(made.get_weights()[0])
    plain, again, unmasked = trained
    np.testing.assert_allclose(again, plain, atol=1e-6)
    assert np.abs(unmasked - plain).max() > 1e-4  # so the mask matters here


@pytest.mark.slow
def test_a_loss_goes_by_the_logits_of_probabilities() -> None:
    x = 100.0 * np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)  # of which softmax makes 0 and 1
    trained = []
    for changes in ({}, {"recompute": ["head"]}):
        keras.utils.set_random_seed(0)
        head = keras.layers.Dense(3, activation="softmax", name="head")
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), head])
        made.compile("sgd", "sparse_categorical_crossentropy")
        tfdist.fit(made, x, np.arange(32) % 3, verbose=0, seed=0, **changes)
        trained.append(made.get_weights())
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_layers_are_chosen_by_pattern_and_outermost() -> None:
    made = model(num_blocks=2)
    assert [layer.name for layer in choose_layers(made, "auto")] == ["normalized", "block_0", "block_1"]
    assert [layer.name for layer in choose_layers(made, ["block_*"])] == ["block_0", "block_1"]
    assert [layer.name for layer in choose_layers(made, ["block_1", "wide"])] == ["block_1", "wide"]


test_a_mistake_is_one_message = each_is_refused(
    lambda changes, tmp_path: run(tmp_path, **(SETTINGS | changes)),
    ({"recompute": "blocks"}, "train.recompute is 'blocks'; write a list of patterns, ['block_*'], or 'auto'"),
    ({"recompute": ["blok_*"]}, "train.recompute names 'blok_*', and no layer"),
    ({"model": adding, "recompute": "auto"}, "The layer 'adds' adds to the loss"),
)


def test_files_of_models_keep_the_name_of_the_position_embedding() -> None:
    layer = PositionEmbedding()
    described = keras.saving.serialize_keras_object(layer)
    assert (layer.name, described["class_name"], described["registered_name"]) == ("places", "Places", "tfdist>Places")
