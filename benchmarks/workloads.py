"""What the benchmarks train: models of a few sizes on made-up examples.

Speed does not depend on what the numbers are, so nothing has to be downloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np

from tfdist.models.convnet import build_convnet
from tfdist.models.mlp import build_mlp

NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, the shape of an example, and the global batch."""

    name: str
    build_model: Callable[[], keras.Model]
    input_shape: Sequence[int]
    global_batch_size: int
    num_examples: int

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Examples float32 [num_examples, *input_shape] and classes int32 [num_examples]."""
        generator = np.random.default_rng(0)
        x = generator.standard_normal((self.num_examples, *self.input_shape), dtype=np.float32)
        return x, generator.integers(0, NUM_CLASSES, self.num_examples, dtype=np.int32)


def mlp(name: str, num_features: int, hidden_units: Sequence[int], batch: int, num_examples: int) -> Workload:
    def build() -> keras.Model:
        return build_mlp(num_features=num_features, num_outputs=NUM_CLASSES, hidden_units=hidden_units)

    return Workload(name, build, (num_features,), batch, num_examples)


def convnet(name: str, input_shape: Sequence[int], batch: int, num_examples: int) -> Workload:
    def build() -> keras.Model:
        return build_convnet(input_shape=input_shape, num_classes=NUM_CLASSES)

    return Workload(name, build, tuple(input_shape), batch, num_examples)


def deep_convnet(name: str, batch: int, num_examples: int) -> Workload:
    """Nine 3×3 convolutions over 32×32 color images, in three stages of 16, 32 and 64 channels, and an average over
    places: 121,226 weights and 17 million multiplications an image, the proportion of a ResNet-20 on CIFAR."""
    input_shape = (32, 32, 3)

    def build() -> keras.Model:
        inputs = x = keras.Input(input_shape)
        for width, stride in zip((16, 32, 64), (1, 2, 2), strict=True):
            for index in range(3):
                strides = stride if index == 0 else 1
                x = keras.layers.Conv2D(width, 3, strides=strides, padding="same", activation="relu")(x)
        x = keras.layers.GlobalAveragePooling2D()(x)
        return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(x))

    return Workload(name, build, input_shape, batch, num_examples)


def heavy_mlp(batch: int = 16, num_examples: int = 2048) -> Workload:
    """Four dense layers of 2048 × 2048: 16.8 million weights, which with Adam's two slots are 202 MB of state."""
    return mlp("heavy", num_features=2048, hidden_units=(2048,) * 4, batch=batch, num_examples=num_examples)


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def metric() -> keras.metrics.Metric:
    return keras.metrics.SparseCategoricalAccuracy(name="accuracy")


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3)
