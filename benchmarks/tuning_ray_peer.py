"""A sweep by Ray Tune, of Keras's `fit`: `python tuning_ray_peer.py LOG SCHEDULER MAX_EPOCHS SEED NUM_TRIALS POINTS`.

SCHEDULER is asha or fifo, POINTS are values in JSON to begin with; two trials at once, each with one processor. What
happens is appended to LOG, an object a line. It joins the cluster of RAY_ADDRESS. Run by tuning.py; needs
`pip install 'ray[tune]'`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

METRIC = "val_sparse_categorical_accuracy"


def write(log: str, event: str, **details: Any) -> None:
    with Path(log).open("a") as file:
        file.write(json.dumps({"event": event, "time": time.time(), **details}) + "\n")


def train(values: dict[str, Any], *, log: str, max_epochs: int) -> None:
    """One trial: the same model, data and epochs as tuning.py's."""
    import keras
    from tuning_experiment import BATCH_SIZE, build, digits

    class Told(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            objective = float((logs or {})[METRIC])
            write(log, "epoch", objective=objective)
            tune.report({METRIC: objective})

    model = build(units=values["units"], dropout=values["dropout"])
    model.compile(
        optimizer=keras.optimizers.Adam(values["learning_rate"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["sparse_categorical_accuracy"],
    )
    x, y = digits()
    fit = {"validation_data": digits(1280, 1797), "epochs": max_epochs, "batch_size": BATCH_SIZE, "verbose": 0}
    started = time.perf_counter()
    model.fit(x, y, **fit, callbacks=[Told()])
    write(log, "fit", seconds=time.perf_counter() - started)


class Ends(tune.Callback):
    """Tells when a trial has ended."""

    def __init__(self, log: str) -> None:
        self._log = log

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        write(self._log, "trial_ended")


def main(log: str, scheduler: str, max_epochs: str, seed: str, num_trials: str, points: str) -> None:
    ray.init(log_to_driver=False)
    epochs = int(max_epochs)
    asha = ASHAScheduler(max_t=epochs, grace_period=1, reduction_factor=3)
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as directory:
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(train, log=log, max_epochs=epochs), {"cpu": 1}),
            param_space={
                "learning_rate": tune.loguniform(1e-4, 1e-1),
                "units": tune.lograndint(8, 129),
                "dropout": tune.uniform(0.0, 0.6),
            },
            tune_config=tune.TuneConfig(
                metric=METRIC,
                mode="max",
                scheduler=asha if scheduler == "asha" else FIFOScheduler(),
                search_alg=BasicVariantGenerator(
                    points_to_evaluate=json.loads(points), max_concurrent=2, random_state=int(seed)
                ),
                num_samples=int(num_trials),
            ),
            run_config=tune.RunConfig(storage_path=directory, callbacks=[Ends(log)], verbose=0),
        )
        tuner.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
