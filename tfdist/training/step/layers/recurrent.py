"""Weights of recurrent layers, read once a pass and not at each time step.

Keras's cells read their weights in the body of TensorFlow's loop, which then keeps them for the way back as it keeps
activations: once for each time step, and zeros of as many bytes beside that. Two LSTMs of 256 units over 64 steps take
a quarter less memory when the loop gets the weights' values. In mixed precision it does not: their gradients would add
up over the time steps in the type of the products. Invariant: a layer computes what it did before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_patches.patches import Patches

OF_KERAS = keras.layers.LSTMCell.__module__.rpartition(".")[0]  # whose cells draw their masks before the loop


def read_weights_once(model: keras.Model, patches: Patches) -> None:
    """Has the model's recurrent layers give their loops values in place of variables."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and _takes_values(layer):
            patches.replace(layer, inner_loop=_with_values(layer.cell, layer.inner_loop))


def _takes_values(layer: keras.layers.RNN) -> bool:
    """Whether its cell's variables stay as they are in the loop (a user's cell may draw from a seed, or count), and are
    computed with in their own type."""
    if not isinstance(layer.cell, keras.layers.Layer):
        return False
    only_reads = all(
        type(each).__module__.startswith(OF_KERAS) or not each.non_trainable_variables
        for each in layer.cell._flatten_layers()
    )
    return only_reads and all(each.compute_dtype == each.variable_dtype for each in layer._flatten_layers())


def _with_values(cell: keras.layers.Layer, inner_loop: Callable[..., Any]) -> Callable[..., Any]:
    def loop(*args: Any, **kwargs: Any) -> Any:
        values = [(weight, tf.convert_to_tensor(weight.value)) for weight in cell.weights]
        with keras.StatelessScope(state_mapping=values):
            return inner_loop(*args, **kwargs)

    return loop
