"""A short training of the digits, whose parts a test changes one at a time."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np
from equivalence.cases import BASE, digits

from tfdist.command_line import exit_status_of
from tfdist.experiment import train
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy
from tfdist.telemetry.result import RunResult
from tfdist.training.run.request import ProfiledSteps, Request
from tfdist.training.run.train_settings import TrainSettings

STEPS_PER_EPOCH = 7
SMALL = BASE | {"deterministic": False, "eval_data": lambda: digits(101)}


@dataclasses.dataclass
class Trained:
    """What a training left behind; `error` is what it raised."""

    directory: pathlib.Path
    model: keras.Model | None = None
    optimizer: keras.optimizers.Optimizer | None = None
    result: RunResult | None = None
    error: Exception | None = None

    def points(self, split: str) -> list[dict[str, Any]]:
        return [p for p in self._lines("metrics.jsonl") if p["split"] == split]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self._lines("events.jsonl") if e["event"] == name]

    def weights(self) -> list[np.ndarray]:
        return [np.array(w) for w in self.model.get_weights()]

    def bits(self) -> str:
        return "".join(w.tobytes().hex() for w in self.weights())

    def exported(self) -> keras.Model:
        return keras.models.load_model(self.directory / "export" / "model.keras")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]


def run(
    directory: pathlib.Path,
    *,
    may_fail: bool = False,
    named: dict[str, str] | None = None,
    profile: ProfiledSteps | None = None,
    initial_epoch: int = 0,
    **changes: Any,
) -> Trained:
    """Trains SMALL with `changes` into `directory`, on one device if they name no strategy.

    `named` are the settings as a gin file would name them, by which a directory is known as another experiment's.
    """
    settings = {"strategy": OneDevice()} | SMALL | changes
    trained = Trained(directory)

    def model() -> keras.Model:
        trained.model = (SMALL | changes)["model"]()
        return trained.model

    def optimizer() -> keras.optimizers.Optimizer:
        trained.optimizer = (SMALL | changes)["optimizer"]()
        return trained.optimizer

    given = (SMALL | changes)["optimizer"]

    settings |= {"model": model, "optimizer": optimizer if callable(given) else given, "task": settings["task"]()}
    try:
        request = Request(
            run_dir=str(directory), settings=lambda: named or {}, profile=profile, initial_epoch=initial_epoch
        )
        trained.result = train(TrainSettings(**settings), request)
    except Exception as error:
        if not may_fail:
            raise
        trained.error = error
    finally:
        keras.config.set_dtype_policy("float32")
    return trained


def train_base(directory: str, strategy: Strategy, **changes: Any) -> None:
    """Trains the equivalence cases' BASE with `changes`, in a program of its own."""
    settings = BASE | {"strategy": strategy} | changes
    train(TrainSettings(**settings | {"task": settings["task"]()}), Request(run_dir=directory))


def run_program(main: Callable[..., None]) -> NoReturn:
    """Runs a test's program with the arguments of its command line, and exits as the command does."""
    sys.exit(exit_status_of(lambda: main(*sys.argv[1:])))


def softmax_model() -> keras.Model:
    inputs = keras.Input((64,))
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(inputs))


def differ(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference between two lists of weights."""
    return max(float(np.abs(np.array(a) - np.array(b)).max()) for a, b in zip(ours, theirs, strict=True))
