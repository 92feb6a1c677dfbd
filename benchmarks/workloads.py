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


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def metric() -> keras.metrics.Metric:
    return keras.metrics.SparseCategoricalAccuracy(name="accuracy")


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3)
