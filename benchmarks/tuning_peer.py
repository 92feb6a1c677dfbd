"""A random search by KerasTuner's own tuner: `python tuning_peer.py LOG DIRECTORY MAX_EPOCHS SEED MAX_TRIALS`.

What happens is appended to LOG, an object a line. Run by tuning.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import keras_tuner
from tuning_experiment import BATCH_SIZE, build, digits

OBJECTIVE = keras_tuner.Objective("val_sparse_categorical_accuracy", "max")


class Log:
    """Where things are told, each with its moment."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def write(self, event: str, **details: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **details}) + "\n")


class Digits(keras_tuner.HyperModel):
    """The same space as tuning.py's."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def build(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        model = build(units=hp.Int("units", 8, 128, sampling="log"), dropout=hp.Float("dropout", 0.0, 0.6))
        model.compile(
            optimizer=keras.optimizers.Adam(hp.Float("learning_rate", 1e-4, 1e-1, sampling="log")),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
        )
        return model

    def fit(self, hp: keras_tuner.HyperParameters, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        history = model.fit(*args, **kwargs)
        self._log.write("fit", seconds=time.perf_counter() - started)
        return history


class Random(keras_tuner.oracles.RandomSearchOracle):
    """Tells when trials end."""

    log: Log

    def end_trial(self, trial: Any) -> None:
        super().end_trial(trial)
        self.log.write("trial_ended")


def main(path: str, directory: str, max_epochs: str, seed: str, max_trials: str) -> None:
    log = Log(path)
    oracle = Random(objective=OBJECTIVE, seed=int(seed) + 1, max_trials=int(max_trials))
    oracle.log = log
    tuner = keras_tuner.Tuner(oracle, Digits(log), directory=directory)
    x, y = digits()
    fit = {"validation_data": digits(1280, 1797), "epochs": int(max_epochs), "batch_size": BATCH_SIZE, "verbose": 0}
    tuner.search(x, y, **fit)


if __name__ == "__main__":
    main(*sys.argv[1:])
