"""What --mode=plan says of memory, beside the peak of a training's process: predicted ÷ measured, within 0.85 and 1.2.

Three models × two precisions × one and four microbatches × with and without gradient checkpointing; every cell is
predicted in one process and measured in another. Takes a quarter of an hour, and up to 2.5 GB.

    python benchmarks/plan.py [--part=MODEL] [--quick] [--json=FILE]
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from measuring import Figure, choose_size, measure_part, measure_peak, read_peak, report

from tfdist import experiment
from tfdist.data.pipeline import PREFETCHED_STEPS
from tfdist.models.transformer import TransformerBlock
from tfdist.planning.traced_step import ALLOCATED, trace_step
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.telemetry.console.console import Console
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TrainSettings

PARTS = ("transformer", "recurrent", "unet")
PRECISIONS = ("float32", "bfloat16")
LEAST, MOST = 0.85, 1.2
NUM_CLASSES = 10
OPERATION_BYTES = 11 * 1024  # that a process which runs a graph keeps of each of its operations; fitted as ALLOCATED is


def measure(parts: Sequence[str], quick: bool) -> Iterator[list[Figure]]:
    precisions, numbers = (PRECISIONS[:1], (1,)) if quick else (PRECISIONS, (1, 4))
    cells = itertools.product(parts, precisions, numbers, choose_size(("keep", "recompute"), ("recompute",)))
    for cell in cells:
        name = " ".join(map(str, cell))
        told, found = (measure_part("plan", part, *cell)[0].ours for part in ("predict_memory", "measure_memory"))
        value = told / found
        yield [
            Figure(f"{name}: not too low", value, LEAST, (value, value), told, found, "MB"),
            Figure(f"{name}: not too high", value, MOST, (value, value), told, found, "MB", at_most=True),
        ]


def build_settings(name: str, precision: str, num_microbatches: str, recomputes: str) -> TrainSettings:
    return EXAMPLES[name].settings(precision, int(num_microbatches), recomputes=recomputes == "recompute")


def measure_memory(*cell: str) -> list[Figure]:
    """By how many MB the peak of this process grows in two steps of a training, its building included."""
    settings = build_settings(*cell)
    with tempfile.TemporaryDirectory() as scratch:
        request = Request(os.path.join(scratch, "run"), keeps=False, console=lambda is_chief: Console())
        return measure_peak("measured", lambda: experiment.train(settings, request))


def predict_memory(*cell: str) -> list[Figure]:
    """By how many MB it is said to grow: by what tracing takes, and by the step's tensors, operations and batches."""
    settings = build_settings(*cell)
    assert isinstance(settings.num_microbatches, int)
    rows = settings.global_batch_size // settings.num_microbatches
    before = read_peak()
    step = trace_step(settings, rows=rows, num_microbatches=settings.num_microbatches)
    traced = read_peak() - before
    running = OPERATION_BYTES * step.num_operations + ALLOCATED * step.tensor_bytes
    told = traced + (running + PREFETCHED_STEPS * step.batch_bytes) / 2**20
    return [Figure("predicted", told, None, (told, told), told, told, "MB")]


@dataclasses.dataclass(frozen=True)
class Example:
    """A model and what it learns from.

    Attributes:
      build: the model, uncompiled.
      shape: of an example.
      batch_size: examples of a step.
      vocabulary: of examples that are numbers of words; 0 where they are float32.
      label_shape: of a label.
    """

    build: Callable[[], keras.Model]
    shape: tuple[int, ...]
    batch_size: int
    vocabulary: int = 0
    label_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", choose_size(self.batch_size, 4))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        generator, count = np.random.default_rng(0), self.batch_size
        labels = generator.integers(0, NUM_CLASSES, (count, *self.label_shape), dtype=np.int32)
        if self.vocabulary:
            return generator.integers(0, self.vocabulary, (count, *self.shape), dtype=np.int32), labels
        return generator.standard_normal((count, *self.shape), dtype=np.float32), labels

    def settings(self, precision: str, num_microbatches: int, *, recomputes: bool) -> TrainSettings:
        return TrainSettings(
            model=self.build,
            train_data=self.arrays,
            strategy=OneDevice("CPU"),
            optimizer=keras.optimizers.Adam,
            task=Supervised(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
            global_batch_size=self.batch_size,
            num_microbatches=num_microbatches,
            steps=2,
            precision=precision,
            recompute=["block_*"] if recomputes else None,
            checkpoint="off",
        )


@keras.saving.register_keras_serializable("plan")
class Block(keras.layers.Layer):
    """Layers one after the other."""

    def __init__(self, layers: list[keras.layers.Layer], **settings: Any) -> None:
        super().__init__(**settings)
        self.inner = layers

    def build(self, shape: Any) -> None:
        for layer in self.inner:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)

    def compute_output_shape(self, shape: Any) -> Any:
        for layer in self.inner:
            shape = layer.compute_output_shape(shape)
        return shape

    def call(self, x: Any) -> Any:
        for layer in self.inner:
            x = layer(x)
        return x


def convolutions(filters: int, count: int, name: str) -> Block:
    layers: list[keras.layers.Layer] = []
    for _ in range(count):
        convolution = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)
        layers += [convolution, keras.layers.BatchNormalization(), keras.layers.Activation("relu")]
    return Block(layers, name=name)


def transformer() -> keras.Model:
    inputs = keras.Input((128,), dtype="int32")
    x = keras.layers.Embedding(8192, 256)(inputs)
    for index in range(choose_size(6, 1)):
        x = TransformerBlock(8, causal=False, dropout=0.1, name=f"block_{index}")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES, dtype="float32")(x))


def recurrent() -> keras.Model:
    inputs = x = keras.Input((64, 128))
    for index in range(2):
        x = keras.layers.LSTM(256, return_sequences=True, name=f"block_{index}")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES, dtype="float32")(x))


def unet() -> keras.Model:
    inputs = x = keras.Input((64, 64, 3))
    skipped = []
    for index, filters in enumerate((16, 32, 64)):
        x = convolutions(filters, 2, f"block_down_{index}")(x)
        skipped.append(x)
        x = keras.layers.MaxPooling2D()(x)
    x = convolutions(128, 2, "block_middle")(x)
    for index, filters in enumerate((64, 32, 16)):
        x = keras.layers.Conv2DTranspose(filters, 2, 2)(x)
        x = keras.layers.Concatenate()([x, skipped.pop()])
        x = convolutions(filters, 2, f"block_up_{index}")(x)
    return keras.Model(inputs, keras.layers.Conv2D(NUM_CLASSES, 1, dtype="float32")(x))


EXAMPLES = {
    "transformer": Example(transformer, (128,), 32, vocabulary=8192),
    "recurrent": Example(recurrent, (64, 128), 256),
    "unet": Example(unet, (64, 64, 3), 192, label_shape=(64, 64)),
}


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, has_quick=True)
