"""The models that the benchmarks train, in Keras, on made-up examples.

Needs Keras alone, on any backend, except for `convnet`, which is one of tfdist's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from measuring import choose_size
from sizes import HEADS, HEAVY, NORM_EPSILON, NUM_CLASSES, Size, examples

layers = keras.layers


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, the shape of an example, and the global batch; `vocabulary` as in `Size`."""

    name: str
    build_model: Callable[[], keras.Model]
    input_shape: Sequence[int]
    global_batch_size: int
    num_examples: int
    vocabulary: int = 0

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return examples(self.num_examples, tuple(self.input_shape), self.vocabulary)


def build_workload(name: str, size: Size) -> Workload:
    """A model and its examples as sizes.py has them."""

    def build() -> keras.Model:
        inputs = keras.Input(size.input_shape, dtype="int32" if size.vocabulary else "float32")
        return keras.Model(inputs, layers.Dense(NUM_CLASSES)(BODIES[size.kind](inputs, size)))

    return Workload(name, build, size.input_shape, size.batch, size.num_examples, size.vocabulary)


def apply_dense(x: Any, size: Size) -> Any:
    for units in size.units:
        x = layers.Dense(units, activation="relu")(x)
    return x


def apply_convolutions(x: Any, size: Size) -> Any:
    """Nine 3×3 convolutions in three stages of 16, 32 and 64 channels, and an average over places."""
    for width, stride in zip((16, 32, 64), (1, 2, 2), strict=True):
        for index in range(3):
            strides = stride if index == 0 else 1
            x = layers.Conv2D(width, 3, strides=strides, padding="same", activation="relu")(x)
    return layers.GlobalAveragePooling2D()(x)


def apply_blocks(x: Any, size: Size) -> Any:
    """As tfdist.models.transformer.TransformerBlock, one for each of `units`, and an average over places."""
    for width in size.units:
        here = layers.LayerNormalization(epsilon=NORM_EPSILON)(x)
        x = x + layers.MultiHeadAttention(HEADS, width // HEADS)(here, here)
        here = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization(epsilon=NORM_EPSILON)(x))
        x = x + layers.Dense(width)(here)
    return layers.GlobalAveragePooling1D()(x)


def apply_recurrent(x: Any, size: Size) -> Any:
    return layers.LSTM(*size.units)(x)


def apply_embedding(x: Any, size: Size) -> Any:
    """Vectors of tokens, averaged, and a dense layer."""
    width, units = size.units
    x = layers.GlobalAveragePooling1D()(layers.Embedding(size.vocabulary, width)(x))
    return layers.Dense(units, activation="relu")(x)


BODIES = {
    "mlp": apply_dense,
    "convnet": apply_convolutions,
    "transformer": apply_blocks,
    "lstm": apply_recurrent,
    "embedding": apply_embedding,
}


def mlp(name: str, num_features: int, hidden_units: Sequence[int], batch: int, num_examples: int) -> Workload:
    return build_workload(name, Size("mlp", (num_features,), batch, num_examples, units=tuple(hidden_units)))


def convnet(name: str, input_shape: Sequence[int], batch: int, num_examples: int) -> Workload:
    from tfdist.models.convnet import build_convnet

    def build() -> keras.Model:
        return build_convnet(input_shape=input_shape, num_classes=NUM_CLASSES)

    return Workload(name, build, tuple(input_shape), choose_size(batch, 8), choose_size(num_examples, 32))


def deep_convnet(name: str, batch: int, num_examples: int) -> Workload:
    """Nine convolutions over 32×32 color images: 121,226 weights and 17 million multiplications an image, the
    proportion of a ResNet-20 on CIFAR."""
    return build_workload(name, Size("convnet", (32, 32, 3), batch, num_examples))


def heavy_mlp(batch: int = HEAVY.batch, num_examples: int = HEAVY.num_examples) -> Workload:
    """Four dense layers of 2048 × 2048."""
    return build_workload("heavy", dataclasses.replace(HEAVY, batch=batch, num_examples=num_examples))


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def metric() -> keras.metrics.Metric:
    return keras.metrics.SparseCategoricalAccuracy(name="accuracy")


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3)
