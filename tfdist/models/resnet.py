"""A small residual network for images of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

GROUPS = 8


def build_resnet(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    filters: Sequence[int] = (16, 32, 64),
    blocks: int = 1,
    dropout: float = 0.0,
) -> keras.Model:
    """A classifier of stages of residual blocks (https://arxiv.org/abs/1603.05027), each stage at half the size.

    Its normalization is over groups of channels of one image, so that a batch may be split in any way.

    Args:
      input_shape: [height, width, channels] of an image.
      num_classes: the length of the output, logits.
      filters: the width of each stage, a multiple of 8.
      blocks: of each stage.
      dropout: the share of the units before the output left out in training.

    Returns:
      An uncompiled model from [n, height, width, channels] to logits [n, num_classes].
    """
    inputs = keras.Input(tuple(input_shape))
    x = keras.layers.Conv2D(filters[0], 3, padding="same", use_bias=False)(inputs)
    for stage, width in enumerate(filters):
        for block in range(blocks):
            x = _residual(x, width, strides=2 if stage and not block else 1)
    x = keras.layers.GlobalAveragePooling2D()(_normalize_and_activate(x))
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    logits = keras.layers.Dense(num_classes, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="resnet")


def _residual(x: Any, width: int, *, strides: int) -> Any:
    """Two convolutions beside a shortcut, which a convolution brings to the same shape where that changes."""
    here = _normalize_and_activate(x)
    changes = strides > 1 or x.shape[-1] != width
    shortcut = keras.layers.Conv2D(width, 1, strides=strides, use_bias=False)(here) if changes else x
    here = keras.layers.Conv2D(width, 3, strides=strides, padding="same", use_bias=False)(here)
    here = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(_normalize_and_activate(here))
    return keras.layers.Add()([shortcut, here])


def _normalize_and_activate(x: Any) -> Any:
    return keras.layers.ReLU()(keras.layers.GroupNormalization(GROUPS)(x))
