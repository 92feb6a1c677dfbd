"""A small generative adversarial network for examples of one shape with values in 0 … 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras


def build_gan(*, example_shape: Sequence[int], noise_size: int = 16, width: int = 128) -> keras.Model:
    """A generator and a discriminator of two hidden layers each, as `gan.GenerativeAdversarial` takes them.

    Args:
      example_shape: of an example, such as [8, 8, 1].
      noise_size: numbers of a draw of noise.
      width: of the hidden layers.

    Returns:
      An uncompiled model of {"examples": [n, *example_shape], "noise": [n, noise_size]} with the layers "generator"
      and "discriminator"; it gives the scores of the examples and of generated ones, [n, 1] each.
    """
    generator = keras.Sequential(
        [
            keras.Input((noise_size,)),
            keras.layers.Dense(width, activation="relu", name="made_1"),
            keras.layers.Dense(width, activation="relu", name="made_2"),
            keras.layers.Dense(math.prod(example_shape), activation="sigmoid", name="made"),
            keras.layers.Reshape(tuple(example_shape)),
        ],
        name="generator",
    )
    discriminator = keras.Sequential(
        [
            keras.Input(tuple(example_shape)),
            keras.layers.Flatten(),
            keras.layers.Dense(width, activation="leaky_relu", name="judged_1"),
            keras.layers.Dense(width, activation="leaky_relu", name="judged_2"),
            keras.layers.Dense(1, dtype="float32", name="score"),
        ],
        name="discriminator",
    )
    examples = keras.Input(tuple(example_shape), name="examples")
    noise = keras.Input((noise_size,), name="noise")
    scores = {"real": discriminator(examples), "made": discriminator(generator(noise))}
    return keras.Model({"examples": examples, "noise": noise}, scores, name="gan")
