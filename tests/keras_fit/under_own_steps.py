"""Trains each kind of keras_fit/own_steps.py by `tfdist.fit` under one engine, and writes what comes out of it.

Arguments: a strategy of equivalence/cases.py, a directory for the files KIND.npz, and perhaps kinds. With KILLED_AT in
the environment the process is killed at the end of so many batches of each kind; the run directories stay beside the
files.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from equivalence.cases import STRATEGIES
from keras_fit.own_steps import DATASET, KINDS

import tfdist
from tfdist.strategies.strategy import Strategy

EPOCHS, BATCH_SIZE = 6, 7
MOVED = "mirrored3"  # whose models are made in no scope


def find_kind(name: str) -> tuple[Any, Any]:
    """The builder and the data of a kind, or of a model of KerasHub."""
    if name in KINDS:
        return KINDS[name]
    from keras_fit.hub_models import MODELS

    return MODELS[name]


def arguments_of(kind: str) -> dict[str, Any]:
    """What `fit` is called with, but for the model."""
    x, *rest = find_kind(kind)[1]
    y = rest[0] if rest else None
    if kind == DATASET:
        x, y = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE), None
        return {"x": x, "epochs": EPOCHS, "verbose": 0, "validation_data": x}
    epochs = EPOCHS if kind in KINDS else 2  # in six, rounding grows to 3e-3 in a ResNet with batches of 3
    evaluates = kind in ("a step with clipping", "compute_metrics and compute_loss")
    held = {"validation_data": (x, y)} if evaluates else {}
    return {"x": x, "y": y, "batch_size": BATCH_SIZE, "epochs": epochs, "shuffle": False, "verbose": 0, **held}


def collect(model: keras.Model, history: keras.callbacks.History) -> dict[str, np.ndarray]:
    """Weights and metrics by name."""
    weights = {f"weight {i}": np.asarray(weight) for i, weight in enumerate(model.weights)}
    return weights | {f"history {name}": np.array(values) for name, values in history.history.items()}


def train(kind: str, strategy: Strategy | None, *, is_moved: bool = False, **how: Any) -> dict[str, np.ndarray]:
    with contextlib.nullcontext() if strategy is None or is_moved else strategy.scope():
        model = find_kind(kind)[0]()
    return collect(model, tfdist.fit(model, **arguments_of(kind), strategy=strategy, **how))


class Killed(keras.callbacks.Callback):
    """Ends the process at the end of a batch."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self._left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def main(engine: str, directory: str, *kinds: str) -> None:
    strategy = STRATEGIES[engine]()
    strategy.connect()
    for kind in kinds or KINDS:
        how: dict[str, Any] = {}
        if batches := int(os.environ.get("KILLED_AT", "0")):
            how = {"run_dir": f"{directory}/run", "checkpoint": tfdist.CheckpointPolicy(every_steps=2)}
            how |= {"callbacks": [Killed(batches)]} if batches > 0 else {}
        found = train(kind, strategy, is_moved=engine == MOVED, **how)
        if strategy.topology.is_chief:
            np.savez(pathlib.Path(directory) / f"{kind}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
