"""A sweep by KerasTuner's own tuners: `python tuning_peer.py LOG SEARCH MAX_EPOCHS SEED SECONDS MAX_TRIALS`.

What happens is appended to LOG, an object a line. Alone it is KerasTuner in one process; with KERASTUNER_TUNER_ID it is
the chief or a worker, as KerasTuner documents it. SECONDS above 0 take the place of training, for each epoch so many;
MAX_TRIALS is of the random search.
Run by tuning.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
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


class Counted:
    """Tells the calls of an oracle."""

    log: Log

    def create_trial(self, tuner_id: str) -> Any:
        trial = super().create_trial(tuner_id)
        self.log.write("asked", status=trial.status)
        return trial

    def end_trial(self, trial: Any) -> None:
        super().end_trial(trial)
        self.log.write("trial_ended")


class Hyperband(Counted, keras_tuner.oracles.HyperbandOracle):
    pass


class Random(Counted, keras_tuner.oracles.RandomSearchOracle):
    pass


class Sleeping(keras_tuner.Tuner):
    """Sleeps for as long as the epochs are said to take."""

    seconds = 0.0

    def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> float:
        values = trial.hyperparameters.values
        time.sleep(self.seconds * (values["tuner/epochs"] - values["tuner/initial_epoch"]))
        return {OBJECTIVE.name: values["learning_rate"]}


def main(path: str, search: str, max_epochs: str, seed: str, seconds: str, max_trials: str) -> None:
    log = Log(path)
    common = {"objective": OBJECTIVE, "seed": int(seed) + 1}
    if search == "hyperband":
        oracle = Hyperband(**common, max_epochs=int(max_epochs), factor=3)
    else:
        oracle = Random(**common, max_trials=int(max_trials))
    oracle.log = log
    kind = keras_tuner.Tuner
    if float(seconds):
        Sleeping.seconds, kind = float(seconds), Sleeping
    directory = os.environ.get("TUNING_DIRECTORY") or tempfile.mkdtemp(prefix="tfdist-benchmark-")
    tuner = kind(oracle, Digits(log), directory=directory)
    x, y = digits()
    fit = {"validation_data": digits(1280, 1797), "epochs": int(max_epochs), "batch_size": BATCH_SIZE, "verbose": 0}
    tuner.search(x, y, **fit)


if __name__ == "__main__":
    main(*sys.argv[1:])
