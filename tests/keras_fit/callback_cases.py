"""Trainings with Keras's callbacks and a spy among them, by Keras's own `fit` or by `tfdist.fit` on any strategy.

    PYTHONPATH=.:tests python -m keras_fit.callback_cases ENGINE DIRECTORY

ENGINE: fit (Keras's, on one device), or a strategy of equivalence/cases.py. Every process leaves what its callbacks saw
in DIRECTORY/RANK.pickle, and they write their files under DIRECTORY/CASE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import math
import os
import pathlib
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from equivalence.cases import STRATEGIES
from keras_fit.behaviors import X, Y, classifier
from keras_fit.spies import BatchSpy, Spy, number, numbers

import tfdist
from tfdist.errors import DivergedError

Make = Callable[[pathlib.Path], list[keras.callbacks.Callback]]


class UsesItsModel(Spy):
    """What a callback does with `self.model` beyond its weights."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        model = self.model
        names = [metric.name for metric in model.metrics]
        computed = numbers(model.evaluate(X[:20], Y[:20], batch_size=7, verbose=0, return_dict=True))
        outputs = model.predict(X[:9], batch_size=4, verbose=0)
        self.calls.append(("model", model.compiled, str(model.loss), names, computed, outputs))


class StopsInTheMiddle(keras.callbacks.Callback):
    """Ends an evaluation after its first batch, and the training in its second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_evaluating = batch == 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = self.epoch == 1 and batch == 1


@dataclasses.dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
      covers: the classes of `keras.callbacks` that this is about.
      make: its callbacks, given a directory for what they write.
      settings: of `fit`, beside those of `BASE`.
      compiled: of `compile`, beside the classifier's own.
      diverges: whether the loss ends as not a number, which `tfdist.fit` raises when its callbacks have seen it.
    """

    covers: tuple[str, ...]
    make: Make
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    compiled: Callable[[], dict[str, Any]] = dict
    diverges: bool = False


BASE: dict[str, Any] = {"epochs": 3, "batch_size": 10, "shuffle": False, "verbose": 0}
HELD_OUT = {"validation_data": (X[:20], Y[:20]), "validation_batch_size": 10}
K = keras.callbacks

CASES: dict[str, Case] = {
    "spy_without_validation": Case(("Callback", "CallbackList"), lambda _: [Spy()], {"initial_epoch": 1}),
    "spy_on_batches": Case(("Callback",), lambda _: [BatchSpy()], HELD_OUT),
    "spy_every_second_epoch": Case(("Callback",), lambda _: [BatchSpy()], HELD_OUT | {"validation_freq": 2}),
    "uses_its_model": Case(("Callback",), lambda _: [UsesItsModel()], HELD_OUT),
    "stops_in_the_middle": Case(("Callback",), lambda _: [StopsInTheMiddle(), BatchSpy()], HELD_OUT),
    "of_epochs": Case(
        ("CSVLogger", "History", "LambdaCallback", "ModelCheckpoint", "ProgbarLogger", "RemoteMonitor", "TensorBoard"),
        lambda path: [
            K.CSVLogger(str(inside(path, "csv") / "log.csv")),
            K.History(),
            K.LambdaCallback(on_epoch_end=lambda epoch, logs: note(path, epoch, numbers(logs))),
            K.ModelCheckpoint(str(inside(path, "best") / "{epoch}.keras"), "val_accuracy", save_best_only=True),
            K.ProgbarLogger(),
            K.RemoteMonitor(root=listening(inside(path, "remote"))),
            K.TensorBoard(str(inside(path, "tensorboard")), write_graph=False),
            Spy(),
        ],
        HELD_OUT,
    ),
    "of_batches": Case(
        ("ModelCheckpoint", "TensorBoard"),
        lambda path: [
            K.ModelCheckpoint(
                str(inside(path, "checkpoints") / "{epoch}-{batch}.weights.h5"), save_weights_only=True, save_freq=3
            ),
            K.TensorBoard(str(inside(path, "tensorboard")), write_graph=False, update_freq=2),
        ],
        HELD_OUT,
    ),
    "early_stopping": Case(
        ("EarlyStopping",),
        lambda _: [K.EarlyStopping("val_loss", patience=1, min_delta=9.0, restore_best_weights=True), Spy()],
        HELD_OUT | {"epochs": 6},
        lambda: {"optimizer": keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.9)},
    ),
    "reduce_rate": Case(
        ("ReduceLROnPlateau",),
        lambda _: [K.ReduceLROnPlateau("val_accuracy", factor=0.5, patience=1, min_delta=0.5), Spy()],
        HELD_OUT | {"epochs": 5},
    ),
    "rate_by_epoch": Case(
        ("LearningRateScheduler",),
        lambda _: [K.LearningRateScheduler(lambda epoch, rate: rate * 0.5**epoch), Spy()],
        HELD_OUT,
    ),
    "rate_by_batch": Case(("LambdaCallback",), lambda _: [RateByBatch(), Spy()], HELD_OUT),
    "averages_swapped": Case(
        ("SwapEMAWeights",),
        lambda _: [K.SwapEMAWeights(swap_on_epoch=True), Spy()],
        HELD_OUT,
        lambda: {"optimizer": keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.5)},
    ),
    "nan": Case(
        ("TerminateOnNaN",),
        lambda _: [K.TerminateOnNaN(), Spy()],
        {"epochs": 6},
        lambda: {"optimizer": keras.optimizers.SGD(math.inf)},
        diverges=True,
    ),
}
# One process, of one replica or of two, trains all; of two processes each kind trains half, and both what is shared.
_NAMES = tuple(CASES)
_OF_BOTH = ("spy_on_batches", "of_epochs", "of_batches")
TRAINED = dict.fromkeys(("fit", "one_device", "mirrored2"), _NAMES) | {
    engine: (*_OF_BOTH, *(name for name in _NAMES[first::2] if name not in _OF_BOTH))
    for first, engine in enumerate(("multi_worker", "horovod"))
}
NOT_COVERED = {
    "BackupAndRestore": "is read as settings of our own checkpoints: training/test_backup.py",
    "OrbaxCheckpoint": "needs the package orbax-checkpoint and the JAX backend",
}


class RateByBatch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.01 / (1 + batch)


def inside(path: pathlib.Path, name: str) -> pathlib.Path:
    """A directory for what one of several callbacks writes."""
    (path / name).mkdir(parents=True, exist_ok=True)
    return path / name


def note(path: pathlib.Path, *what: Any) -> None:
    with (path / f"noted-{rank()}.jsonl").open("a") as lines:
        lines.write(json.dumps(what) + "\n")


def listening(path: pathlib.Path) -> str:
    """The address of a server that notes what is posted to it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            note(path, self.path, body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def rank() -> int:
    if "TF_CONFIG" in os.environ:
        return json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    return int(os.environ.get("HOROVOD_RANK", 0))


def done(case: Case, path: pathlib.Path, fit: Callable[..., Any], scope: Any) -> dict[str, Any]:
    """What can be seen of a training once it is over."""
    with scope:
        model = classifier(**case.compiled())
    path.mkdir(parents=True, exist_ok=True)
    callbacks = case.make(path)
    is_list = "CallbackList" in case.covers
    given = K.CallbackList(callbacks, add_history=True, model=model, epochs=3, steps=5) if is_list else callbacks
    calls = [spy.calls for spy in callbacks if isinstance(spy, Spy)]
    if case.diverges:
        with contextlib.suppress(DivergedError):
            fit(model, X, Y, callbacks=given, **BASE | case.settings)
        return {"calls": calls}
    history = fit(model, X, Y, callbacks=given, **BASE | case.settings)
    return {
        "calls": calls,
        "history": {name: [*map(number, values)] for name, values in history.history.items()},
        "is the model's": history is model.history,
        "epochs": history.epoch,
        "weights": [np.asarray(weight) for weight in model.get_weights()],
        "metrics": [metric.name for metric in model.metrics],
    }


def main(engine: str, directory: str) -> None:
    if engine == "fit":
        fit, scope = (lambda model, *args, **kwargs: model.fit(*args, **kwargs)), contextlib.nullcontext
    else:
        strategy = STRATEGIES[engine]()
        strategy.connect()
        fit, scope = tfdist.fit, strategy.scope
    found = {
        name: done(case, pathlib.Path(directory, name), fit, scope())
        for name, case in CASES.items()
        if name in TRAINED[engine]
    }
    pathlib.Path(directory, f"{rank()}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
