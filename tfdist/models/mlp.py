"""A multilayer perceptron for rows of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import keras


def build_mlp(
    *,
    num_features: int,
    num_outputs: int,
    hidden_units: Sequence[int] = (64, 64),
    activation: str = "relu",
    dropout: float = 0.0,
) -> keras.Model:
    """Dense layers, one for each of `hidden_units`, then a linear output.

    Args:
      num_features: the length of a row.
      num_outputs: the length of the output: classes (logits) or regression targets.
      hidden_units: the width of each hidden layer.
      activation: of the hidden layers, by Keras's name.
      dropout: the share of each hidden layer's units left out in training.

    Returns:
      An uncompiled model from [n, num_features] to [n, num_outputs].
    """
    inputs = keras.Input((num_features,))
    x = inputs
    for units in hidden_units:
        x = keras.layers.Dense(units, activation=activation)(x)
        if dropout:
            x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, keras.layers.Dense(num_outputs, dtype="float32", name="output")(x), name="mlp")
