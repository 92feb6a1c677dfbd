"""Callbacks that keep what they are told."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def number(value: Any) -> float | str:
    return float(value) if np.isfinite(value) else "not finite"


def numbers(logs: Any) -> dict[str, float | str]:
    return {name: number(value) for name, value in (logs or {}).items()}


def rate_of(model: keras.Model) -> float | str:
    return number(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


class Spy(keras.callbacks.Callback):
    """Keeps every hook that comes once an epoch or a run, in its order, with its logs and the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append(("train_begin", self.params["epochs"], self.params["steps"], numbers(logs)))

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append(("train_end", numbers(logs)))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch_begin", epoch, numbers(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch_end", epoch, numbers(logs), rate_of(self.model)))

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.append(("test_begin", numbers(logs)))

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(("test_end", numbers(logs)))


class BatchSpy(Spy):
    """Keeps the hooks of batches as well."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("train_batch_begin", batch, numbers(logs)))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("train_batch_end", batch, numbers(logs)))

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("test_batch_begin", batch, numbers(logs)))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("test_batch_end", batch, numbers(logs)))
