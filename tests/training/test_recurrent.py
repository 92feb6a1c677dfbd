"""Recurrent layers compute what they did when their weights are read once, and keep no copy of them for each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_patches.patches import Patches
from tfdist.training.step.layers.recurrent import read_weights_once

layers = keras.layers
STEPS, FEATURES, UNITS = 6, 5, 7


class DrawingCell(layers.Layer):
    """Draws at each time step, so that its seed moves along in the loop."""

    state_size = UNITS

    def build(self, shape: Any) -> None:
        self.dense = layers.Dense(UNITS)
        self.dense.build(shape)
        self.dropout = layers.Dropout(0.5, seed=3)

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        output = self.dropout(self.dense(inputs) + states[0], training=training)
        return output, [output]


MODELS: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: layers.LSTM(UNITS),
    "GRU": lambda: layers.GRU(UNITS, return_sequences=True),
    "mixed precision": lambda: layers.GRU(UNITS, dtype="mixed_bfloat16"),
    "mixed around a float32 cell": lambda: layers.RNN(layers.GRUCell(UNITS, dtype="float32"), dtype="mixed_bfloat16"),
    "dropout": lambda: layers.LSTM(UNITS, dropout=0.3, recurrent_dropout=0.3, seed=1),
    "both ways": lambda: layers.Bidirectional(layers.SimpleRNN(UNITS)),
    "stacked": lambda: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(4), layers.GRUCell(UNITS, dropout=0.2)])),
    "a user's cell that draws": lambda: layers.RNN(DrawingCell()),
}
AS_EVER = {"mixed precision", "mixed around a float32 cell", "a user's cell that draws"}


def loss_and_gradients(model: keras.Model) -> tuple[Any, Any]:
    """The graph, and what it gives."""
    x = np.random.default_rng(0).standard_normal((4, STEPS, FEATURES), dtype=np.float32)

    @tf.function(autograph=False)
    def computed() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(model(x, training=True), tf.float32) ** 2)
        return loss, tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    function = computed.get_concrete_function()
    return function.graph, tf.nest.map_structure(lambda tensor: tensor.numpy(), function())


def kept_shapes(graph: Any) -> set[tuple[int, ...]]:
    """Of what loops keep for the way back."""
    bodies = [
        graph._get_function(operation.get_attr("body").name).graph
        for operation in graph.get_operations()
        if operation.type == "While"
    ]
    operations = [operation for body in bodies for operation in body.get_operations()]
    return {tuple(each.inputs[1].shape) for each in operations if each.type == "TensorListPushBack"}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_same_and_seeds_move_along(name: str) -> None:
    found = []
    for reads_once in (False, True):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((STEPS, FEATURES))
        model = keras.Model(inputs, MODELS[name]()(inputs))
        with Patches() as patches:
            if reads_once:
                read_weights_once(model, patches)
            graph, (loss, gradients) = loss_and_gradients(model)
        seeds = [v.numpy() for v in model.variables if v.dtype.startswith("uint")]
        shapes = {tuple(v.shape) for v in model.trainable_variables} & kept_shapes(graph)
        found.append((loss, gradients, seeds, shapes))
    (loss, gradients, seeds, before), (loss_of_values, of_values, seeds_of_values, after) = found
    np.testing.assert_array_equal(loss, loss_of_values)
    for expected, gradient in zip(gradients, of_values, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_equal(seeds_of_values, seeds)
    assert after == (before if name in AS_EVER else set())
    assert not any("inner_loop" in vars(layer) for layer in model._flatten_layers())
