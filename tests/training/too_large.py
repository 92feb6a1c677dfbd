"""Trains a model of 400 MB in a process that is killed if it takes much memory between the model and the last step.

    python -m training.too_large DIRECTORY STRATEGY SHARDING MEGABYTES

SHARDING: as the setting, or none. MEGABYTES: by which the process may grow, as under the memory limit of a container,
which counts what is in memory and kills. Leaves in DIRECTORY-built-RANK by how many megabytes building the model made
it grow at its peak.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import threading
from typing import Any

import keras
from equivalence.cases import STRATEGIES, digits
from training.trainings import run_program, train_base

BLOCKS, WIDTH, HIDDEN = 6, 2048, 4096


def peak_megabytes() -> int:
    kilobytes = re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert kilobytes is not None
    return int(kilobytes[1]) // 2**10


def large_model() -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.Dense(WIDTH)(inputs)
    for index in range(BLOCKS):
        layers = [keras.layers.Dense(HIDDEN, "tanh"), keras.layers.Dense(WIDTH, "tanh")]
        x = keras.layers.Add()([x, keras.Sequential(layers, name=f"block_{index}")(x)])
    return keras.Model(inputs, keras.layers.Dense(10)(x))


class Limit(keras.callbacks.Callback):
    """Kills the process at a peak above the limit, until the export, which is of the whole model."""

    def __init__(self, megabytes: int, built: pathlib.Path) -> None:
        super().__init__()
        self._before, self._megabytes, self._built = peak_megabytes(), megabytes, built
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            if peak_megabytes() - self._before > self._megabytes:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_begin(self, logs: Any = None) -> None:
        self._built.write_text(str(peak_megabytes() - self._before))

    def on_train_end(self, logs: Any = None) -> None:
        self._is_over.set()


def main(directory: str, strategy_name: str, sharding: str, megabytes: str) -> None:
    strategy = STRATEGIES[strategy_name]()
    strategy.connect()
    limit = Limit(int(megabytes), pathlib.Path(f"{directory}-built-{strategy.topology.worker_index}"))
    settings = {
        "model": large_model,
        "optimizer": lambda: keras.optimizers.Adam(1e-4),
        "train_data": lambda: digits(128),
        "eval_data": None,
        "epochs": 1,
        "callbacks": [limit],
        "checkpoint": "off",
        "sharding": None if sharding == "none" else sharding,
    }
    train_base(directory, strategy, **settings)


if __name__ == "__main__":
    run_program(main)
