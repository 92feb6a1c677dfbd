"""Multilayer perceptrons: of rows of numbers, and one with several outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def build_heads(
    *, input_shape: Sequence[int], heads: Mapping[str, int], hidden_units: Sequence[int] = (128, 64)
) -> keras.Model:
    """Builds a multilayer perceptron with several outputs, one linear layer each on shared hidden layers.

    Args:
      input_shape: of an example, which is flattened.
      heads: the length of each output, by its name.
      hidden_units: the width of each hidden layer.

    Returns:
      An uncompiled model from [n, *input_shape] to a dict of [n, length].
    """
    inputs = keras.Input(tuple(input_shape))
    x = keras.layers.Flatten()(inputs)
    for units in hidden_units:
        x = keras.layers.Dense(units, activation="relu")(x)
    return keras.Model(
        inputs,
        {name: keras.layers.Dense(size, dtype="float32", name=name)(x) for name, size in heads.items()},
        name="heads",
    )
