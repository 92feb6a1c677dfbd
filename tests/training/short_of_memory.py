"""Trains a model one of whose batches takes four times the memory of the others, in a process that has little.

    python -m training.short_of_memory DIRECTORY STRATEGY MEGABYTES STEP [off]

MEGABYTES: what the process may take beyond what it has before its first step; 0 for all. STEP: whose batch it is.
STRATEGY: as in equivalence/cases.py; of several workers the last one has little alone. off: without recovery.
"""

from __future__ import annotations

import pathlib
import resource
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from equivalence.cases import STRATEGIES, digits
from training.trainings import run_program, train_base

from tfdist.strategies.strategy import Strategy

WIDTH = 1_000_000  # numbers that an example's activations take, 256 MB for a batch of 64


THREADS = 300 * 2**20  # bytes


def marked_digits(step: int) -> tuple[np.ndarray, np.ndarray]:
    """One example of the step's batch has a bright corner, which is dark in all others."""
    images, labels = digits(384)
    images = images.copy()
    images[64 * (step - 1) + 40, 0] = 1.0
    return images, labels


def widened(x: Any) -> Any:
    """The mean of as many copies of a number as are wanted, and four times as many in a batch with a mark."""
    width = WIDTH * (1 + 3 * tf.cast(tf.reduce_max(x[:, 1]), tf.int32))
    return tf.reduce_mean(tf.tanh(tf.tile(x[:, :1], [1, width])), axis=1, keepdims=True)


def wide_model() -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.Dense(16, "tanh")(inputs)
    both = keras.layers.Concatenate()([x[:, :1], inputs[:, :1]])
    mean = keras.layers.Lambda(widened, output_shape=(1,))(both)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Concatenate()([x, mean])))


def leave_memory(megabytes: int) -> None:
    """Lets this process take so much more than it has, and no more."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


class Limits(keras.callbacks.Callback):
    """Takes memory away before the first step."""

    def __init__(self, megabytes: int, strategy: Strategy) -> None:
        super().__init__()
        self._megabytes, self._strategy = megabytes, strategy

    def on_train_begin(self, logs: Any = None) -> None:
        topology = self._strategy.topology
        if self._megabytes and topology.worker_index == topology.num_workers - 1:
            before, most = resource.getrlimit(resource.RLIMIT_AS)
            if before == resource.RLIM_INFINITY:
                leave_memory(self._megabytes)
            else:  # the threads of one more pipeline take addresses, and TensorFlow aborts where it gets none
                resource.setrlimit(resource.RLIMIT_AS, (before + THREADS, most))


def main(directory: str, strategy_name: str, megabytes: str, step: str, recovery: str = "on") -> None:
    strategy = STRATEGIES[strategy_name]()
    settings = {
        "model": wide_model,
        "train_data": lambda: marked_digits(int(step)),
        "eval_data": None,
        "epochs": 1,
        "shuffle": False,
        "callbacks": [Limits(int(megabytes), strategy)],
        "deterministic": False,
        "recovery": recovery,
    }
    train_base(directory, strategy, **settings)


if __name__ == "__main__":
    run_program(main)
