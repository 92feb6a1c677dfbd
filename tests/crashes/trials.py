"""The model of trials.gin: any strategy with any sharding trains it, and XLA is tried on it from the second step on."""

from __future__ import annotations

import keras
from training import xla_trials


def build_model(shape: tuple[int, ...] = (8, 8, 1), batch_norm: bool = False) -> keras.Model:
    """Without dropout, whose masks are each replica's own; with `batch_norm` XLA may compile the update alone."""
    xla_trials.force()
    inputs = keras.Input(shape)
    block = keras.Sequential([keras.layers.Dense(24, "tanh"), keras.layers.Dense(16, "tanh")], name="block")
    x = block(keras.layers.Flatten()(inputs))
    if batch_norm:
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
    return keras.Model(inputs, keras.layers.Dense(10, name="head")(x))
