"""What a case of the zoo is: a small training around one public class of Keras.

Invariant: arrays and models depend on nothing but the case, so every strategy trains the same. Run by `tools/zoo.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.tasks.supervised import Supervised

NUM_EXAMPLES = 21  # batches of 8, 8 and 5: the last one is split unevenly
NUM_CLASSES = 3
Data = Callable[[], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Attributes:
      covers: the public names that it shows: one, or all metrics that were computed in it.
      model: builds the model.
      data: gives `NUM_EXAMPLES` examples.
      task: gives loss and metrics.
      optimizer: builds the optimizer.
      evaluates: whether the model is evaluated too, for which it is traced once more.
    """

    covers: Sequence[str]
    model: Callable[[], keras.Model]
    data: Data
    task: Callable[[], Supervised] = lambda: Supervised(loss=make_loss())
    optimizer: Callable[[], keras.optimizers.Optimizer] = lambda: keras.optimizers.SGD(0.05)
    evaluates: bool = False


def make_loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def draw_normal(*shape: int, seed: int = 1) -> np.ndarray:
    """Examples [NUM_EXAMPLES, *shape] of standard normal float32 numbers."""
    return np.random.default_rng(seed).normal(size=(NUM_EXAMPLES, *shape)).astype(np.float32)


def draw_uniform(*shape: int, seed: int = 2) -> np.ndarray:
    """Examples of float32 numbers from 0 to 1."""
    return np.random.default_rng(seed).uniform(size=(NUM_EXAMPLES, *shape)).astype(np.float32)


def draw_whole(*shape: int, below: int = NUM_CLASSES, seed: int = 3) -> np.ndarray:
    """Examples of int32 numbers from 0 on."""
    return np.random.default_rng(seed).integers(below, size=(NUM_EXAMPLES, *shape), dtype=np.int32)


def draw_one_hot() -> np.ndarray:
    return np.eye(NUM_CLASSES, dtype=np.float32)[draw_whole()]


def build_dense(units: int = NUM_CLASSES, activation: str | None = None) -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(units, activation=activation)(hidden))
