"""A small experiment to sweep, and what is read of a sweep afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from processes import running
from sklearn.datasets import load_digits

MODULE = """\
import pathlib
import time
import keras
import numpy as np

FILE = pathlib.Path(__file__).with_name("digits.npz")

class Held(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        while epoch >= 5 and FILE.with_name("hold").exists():
            time.sleep(0.02)

class HeldInEpoch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        while batch >= 10 and FILE.with_name("hold").exists():
            time.sleep(0.02)

def linear(units=0):
    inputs = keras.Input((64,))
    x = keras.layers.Dense(units, "relu")(inputs) if units else inputs
    return keras.Model(inputs, keras.layers.Dense(10)(x))

def digits(first=0, last=960):
    with np.load(FILE) as held:
        return held["images"][first:last], held["labels"][first:last]
"""
EXPERIMENT = """\
import keras
import tiny
from tfdist.strategies import one_device
from tfdist.tasks import supervised
from tfdist.tuning.search import search
from tfdist.tuning.search import space

train.model = @tiny.linear
train.optimizer = @keras.optimizers.SGD
train.task = @supervised.Supervised()
train.train_data = @tiny.digits
train.eval_data = @held_out/tiny.digits
train.strategy = @one_device.OneDevice(device='CPU:0')
train.epochs = 4
train.global_batch_size = 64
train.deterministic = True
keras.optimizers.SGD.learning_rate = 0.1
held_out/tiny.digits.first = 960
held_out/tiny.digits.last = 1500
supervised.Supervised.loss = @keras.losses.SparseCategoricalCrossentropy(from_logits=True)
supervised.Supervised.metrics = [@keras.metrics.SparseCategoricalAccuracy]
tune.objective = 'val_sparse_categorical_accuracy'
tune.search = @search.Random()
tune.space = {'keras.optimizers.SGD.learning_rate': @space.log_uniform(low=1e-3, high=1.0)}
"""
ACCURACY = "val_sparse_categorical_accuracy"


def write_experiment(directory: pathlib.Path) -> pathlib.Path:
    """The gin file, with its module and data beside it."""
    images, labels = load_digits(return_X_y=True)
    np.savez(directory / "digits.npz", images=(images / 16).astype(np.float32), labels=labels.astype(np.int32))
    (directory / "tiny.py").write_text(MODULE)
    path = directory / "tiny.gin"
    path.write_text(EXPERIMENT)
    return path


@contextlib.contextmanager
def held(gin_file: pathlib.Path) -> Iterator[None]:
    """Inside, trials with `tiny.Held` do not get beyond their sixth epoch, however slow the others are."""
    mark = gin_file.with_name("hold")
    mark.touch()
    try:
        yield
    finally:
        mark.unlink()


def arguments(gin_file: pathlib.Path, run_dir: pathlib.Path | str, *parameters: str, mode: str = "tune") -> list[str]:
    """Of the command."""
    given = [f"--gin_param={parameter}" for parameter in parameters]
    return [f"--gin_file={gin_file}", *given, f"--run_dir={run_dir}", f"--mode={mode}"]


def finish(command: list[str], log: pathlib.Path, variables: Mapping[str, str] = {}) -> None:
    """Runs a command to its end, which is a good one."""
    with running(command, log, variables) as chief:
        assert chief.end() == 0, chief.output


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep left behind."""

    directory: pathlib.Path

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.directory / "sweep.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # of a killed chief half a line may stay until the next one removes it
        return [json.loads(line) for line in whole.splitlines()]

    def of(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """The events of a kind that have these details."""
        return [e for e in self.events if e["event"] == kind and all(e.get(k) == v for k, v in wanted.items())]

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The ends that count."""
        return [e for e in self.of("trial_ended") if e["status"] != "interrupted"]

    @property
    def outcomes(self) -> dict[tuple[str, int], tuple[Any, ...]]:
        """Values, status and objective of each trial and rung."""
        values = {(e["trial"], e["rung"]): e["values"] for e in self.of("trial_started")}
        return {
            (e["trial"], e["rung"]): (values[e["trial"], e["rung"]], e["status"], e["objective"], e["epochs"])
            for e in self.ends
        }

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.directory / "result.json").read_text())

    def metrics(self, trial: str, split: str = "eval") -> list[dict[str, Any]]:
        lines = (self.directory / "trials" / trial / "metrics.jsonl").read_text().splitlines()
        return [point for point in map(json.loads, lines) if point["split"] == split]

    def told(self, trial: str) -> list[dict[str, Any]]:
        """The events of the trial's own run."""
        lines = (self.directory / "trials" / trial / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def pid(self, trial: str) -> int | None:
        """Of the process that trains it now, or has built it and waits; none before, and after its end."""
        try:
            return json.loads((self.directory / "trials" / trial / ".lease").read_text())["pid"]
        except (FileNotFoundError, ValueError):
            return None
