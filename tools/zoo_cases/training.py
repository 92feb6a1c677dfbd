"""Trains cases of the zoo under one strategy, all in one process a worker.

    python -m zoo_cases.training WAY DIRECTORY CASE …

WAY: a key of `STRATEGIES` (multi_worker with TF_CONFIG, horovod under horovodrun) or of `OTHER_WAYS`. What each left
behind lies in DIRECTORY/KIND/NAME.npz, written by the chief when the case is done: its weights, losses and metrics, or
its error.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import PreemptedError, UserError
from tfdist.experiment import train
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.multi_worker import MultiWorker
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TrainSettings
from zoo_cases.case import Case
from zoo_cases.collection import collect_cases

STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "one_device": OneDevice,
    "mirrored": lambda: Mirrored(num_cpu_devices=2),
    "multi_worker": MultiWorker,
    "horovod": Horovod,
}
# Other ways to train a layer on several replicas.
OTHER_WAYS: Mapping[str, tuple[Callable[[], Strategy], dict[str, Any]]] = {
    "three_replicas": (lambda: Mirrored(num_cpu_devices=3), {}),
    "microbatches": (STRATEGIES["mirrored"], {"num_microbatches": 2}),
    "xla": (STRATEGIES["mirrored"], {"xla": "on", "deterministic": False}),  # XLA pools in no fixed order
}


def result_path(directory: str | os.PathLike[str], key: str) -> pathlib.Path:
    """Where a case's result lies."""
    return pathlib.Path(directory, f"{key.replace(' ', '_')}.npz")


def train_case(case: Case, strategy: Strategy, run_dir: str, **others: Any) -> dict[str, np.ndarray]:
    """The weights after an epoch of three batches, and what was logged; `others` are settings of the training."""
    models: list[keras.Model] = []

    def model() -> keras.Model:
        models.append(case.model())
        return models[-1]

    settings = TrainSettings(
        model=model,
        optimizer=case.optimizer,
        task=case.task(),
        train_data=case.data,
        eval_data=case.data if case.evaluates else None,
        strategy=strategy,
        global_batch_size=8,
        eval_batch_size=8,
        epochs=1,
        seed=7,
        **{"deterministic": True, "steps_per_call": 3, "checkpoint": "off"} | others,
    )
    result = train(settings, Request(run_dir=run_dir))
    variables = [v for v in models[-1].variables if v.dtype != "string"]
    weights = {f"weight_{i:03d}": np.array(v.value) for i, v in enumerate(variables)}
    logged = {f"train {name}": value for name, value in result.train_metrics.items()}
    logged |= {f"eval {name}": value for name, value in result.eval_metrics.items()}
    return {**weights, **{name: np.asarray(value) for name, value in logged.items()}}


def main(way: str, directory: str, keys: list[str]) -> None:
    """Trains the cases in this order and writes what each left behind."""
    build, others = (STRATEGIES[way], {}) if way in STRATEGIES else OTHER_WAYS[way]
    strategy = build()
    topology = strategy.connect()
    every = collect_cases()
    for key in keys:
        shared = pathlib.Path(directory, "runs", key.replace(" ", "_"))
        try:
            found: dict[str, Any] = train_case(every[key], strategy, str(shared), **others)
        except PreemptedError:
            raise
        except Exception as error:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            found = {"error": np.array(f"{kind}{error}")}
        tf.keras.backend.clear_session()
        if topology.is_chief:
            _write(result_path(directory, key), found)


def _write(path: pathlib.Path, found: dict[str, np.ndarray]) -> None:
    """Writes the file whole or not at all: a case without one is begun anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False, suffix=".part") as file:
        np.savez(file, **found)
    os.replace(file.name, path)
    print(json.dumps({"case": path.stem, "failed": "error" in found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
