"""A small convolutional network for images of one size."""

from __future__ import annotations

from collections.abc import Sequence

import keras


def build_convnet(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    filters: Sequence[int] = (32, 64),
    dense_units: int = 128,
    dropout: float = 0.0,
) -> keras.Model:
    """A classifier: for each of `filters` a 3×3 convolution and 2×2 max pooling, then a dense layer.

    Args:
      input_shape: [height, width, channels] of an image.
      num_classes: the length of the output, logits.
      filters: the width of each convolution.
      dense_units: the width of the dense layer before the output.
      dropout: the share of the dense layer's units left out in training.

    Returns:
      An uncompiled model from [n, height, width, channels] to logits [n, num_classes].
    """
    inputs = keras.Input(tuple(input_shape))
    x = inputs
    for width in filters:
        x = keras.layers.ReLU()(keras.layers.Conv2D(width, 3, padding="same")(x))
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(dense_units, activation="relu")(x)
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    logits = keras.layers.Dense(num_classes, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="convnet")
