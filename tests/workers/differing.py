"""Small trainings by two workers of which the second is different in one way.

    python -m tfdist.launch --workers=2 [--launcher=horovod] --module=workers.differing -- DIRECTORY CASE [CASE …]

CASE is a name in OF_THE_SECOND, OF_THE_CHIEF or ACTS. Workers share DIRECTORY/CASE/shared; their own disks are
DIRECTORY/CASE/apart-0 and -1. Each writes DIRECTORY/CASE/worker-N.json at the case's end: exit status and message.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import experiment
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.strategies import failure_report
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.multi_worker import MultiWorker
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.supervised import Supervised
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import EvaluateSettings, TrainSettings

NUM_EXAMPLES = 64


class Worker:
    """This process, as a case changes it."""

    def __init__(self, strategy: Strategy, directory: pathlib.Path) -> None:
        self.index = strategy.topology.worker_index
        self.is_second = self.index == 1
        self.strategy = strategy
        self.directory = directory
        self.disk = directory / f"apart-{self.index}"
        self.disk.mkdir(parents=True, exist_ok=True)
        self.run_dir = str(directory / "shared")
        self.settings: dict[str, Any] = {
            "model": model_of(8),
            "optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
            "task": Supervised(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
            "train_data": lambda: examples(),
            "strategy": self.strategy,
            "global_batch_size": 16,
            "epochs": 3,
            "xla": "off",
            "checkpoint": CheckpointPolicy(every_steps=2),
        }
        self.named: dict[str, str] = {}


def examples(count: int = NUM_EXAMPLES, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    return generator.random((count, 8), np.float32), np.arange(count) % classes


def model_of(units: int, layers: int = 1, dropout: float = 0.0) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        inputs = keras.Input((8,))
        x = inputs
        for _ in range(layers):
            x = keras.layers.Dense(units, activation="relu")(x)
        x = keras.layers.Dropout(dropout)(x) if dropout else x
        return keras.Model(inputs, keras.layers.Dense(4)(x))

    return build


def embedding_model() -> keras.Model:
    inputs = keras.Input((8,), dtype="int32")
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Flatten()(keras.layers.Embedding(100, 4)(inputs))))


class Acting(keras.callbacks.Callback):
    """Calls a function in one hook, with itself."""

    def __init__(self, hook: str, act: Callable[[keras.callbacks.Callback], object]) -> None:
        super().__init__()
        setattr(self, hook, lambda *given, **named: act(self))


def fail(*given: object) -> None:
    raise ValueError("the cause is here")


def change_rate(callback: Any) -> None:
    callback.model.optimizer.learning_rate.assign(0.01)


def change_weights(callback: Any) -> None:
    callback.model.trainable_variables[0].assign_add(0.5 * tf.ones_like(callback.model.trainable_variables[0]))


def train(worker: Worker) -> None:
    settings = TrainSettings(**worker.settings)
    experiment.train(settings, Request(run_dir=worker.run_dir, settings=lambda: worker.named))


def leave(*given: object) -> None:
    sys.exit(7)


# Settings of both workers, of the second alone, and of the chief alone.
OF_BOTH: dict[str, dict[str, Any]] = {
    "other_evaluation_data": {"eval_data": lambda: examples()},
    "other_dropout": {"model": model_of(8, dropout=0.1)},
    **{f"on_{hook}_fails": {"eval_data": lambda: examples()} for hook in ("test_batch_end", "test_end")},
}
OF_THE_SECOND: dict[str, dict[str, Any]] = {
    "fewer_examples": {"train_data": lambda: examples(NUM_EXAMPLES - 16)},
    "a_few_examples_fewer": {"train_data": lambda: examples(NUM_EXAMPLES - 3)},  # as many steps, which hides it
    "other_examples": {"train_data": lambda: (examples()[0][::-1].copy(), examples()[1])},
    "other_labels": {"train_data": lambda: (examples()[0], examples()[1][::-1].copy())},
    "other_structure": {"train_data": lambda: (examples()[0].astype(np.int32), examples()[1])},
    "other_evaluation_data": {"eval_data": lambda: examples(NUM_EXAMPLES - 16)},
    "other_units": {"model": model_of(12)},
    "more_layers": {"model": model_of(8, layers=2)},
    "other_dropout": {"model": model_of(8, dropout=0.5)},
    "other_optimizer": {"optimizer": lambda: keras.optimizers.Adam(0.1)},
    "other_momentum": {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.5)},
    "other_epochs": {"epochs": 5},
    "rate_changed_in_training": {"callbacks": [Acting("on_epoch_end", change_rate)]},
    "weights_changed_in_training": {"callbacks": [Acting("on_train_batch_end", change_weights)]},
    "a_hook_exits": {"callbacks": [Acting("on_epoch_begin", leave)]},
    "data_fails": {"train_data": fail},
    "model_fails": {"model": fail},
    "optimizer_fails": {"optimizer": fail},
    **{
        f"on_{hook}_fails": {"callbacks": [Acting(f"on_{hook}", fail)]}
        for hook in ("train_begin", "train_batch_end", "test_batch_end", "test_end", "epoch_end", "train_end")
    },
}
OF_THE_CHIEF: dict[str, dict[str, Any]] = {
    "chiefs_hook_fails": {"callbacks": [Acting("on_epoch_begin", fail)]},
    "chiefs_data_fails": {"train_data": fail},
}


# Each changes what else a worker has, or finds; a function returned is called in place of `train`.
def other_setting(worker: Worker) -> None:
    worker.named = {"train.model": "@build", "build.units": "12" if worker.is_second else "8"}


def bad_id(worker: Worker) -> None:
    x = (examples()[0] * 99).astype(np.int32)
    x[:, 0] = 100_000
    given = (x, examples()[1])
    worker.settings |= {"model": embedding_model, "train_data": lambda: given, "shuffle": False}


def bad_id_of_the_second(worker: Worker) -> None:
    """In the rows of the first batch that the second worker computes."""
    x = (examples()[0] * 99).astype(np.int32)
    x[12, 0] = 100_000
    worker.settings |= {"model": embedding_model, "train_data": lambda: (x, examples()[1]), "shuffle": False}
    worker.settings |= {"eval_data": None, "xla": "auto"}


def late_bad_id_of_the_second(worker: Worker) -> None:
    """In an evaluation, between whose batches nothing is exchanged."""
    x = (examples()[0] * 99).astype(np.int32)
    bad = x.copy()
    bad[12, 0] = 100_000
    worker.settings |= {"model": embedding_model, "train_data": lambda: (x, examples()[1])}
    worker.settings |= {"eval_data": lambda: (bad, examples()[1])}


def start_from_of_one_disk(worker: Worker) -> None:
    """The chief has the file; the second worker need not."""
    path = worker.disk / "first.weights.h5"
    if not worker.is_second:
        model = model_of(8)()
        for number, variable in enumerate(model.trainable_variables):
            variable.assign(keras.ops.ones_like(variable) * 0.01 * (number + 1))
        model.save_weights(path)
    worker.settings |= {"start_from": "first.weights.h5", "epochs": 1}
    os.chdir(worker.disk)
    worker.settings["callbacks"] = [Acting("on_train_begin", lambda callback: note_weights(worker, callback.model))]


def start_from_hdf5_of_one_disk(worker: Worker) -> None:
    """The same with the layout of Keras 1 and 2, which tfdist reads by itself."""
    start_from_of_one_disk(worker)
    if not worker.is_second:
        model = model_of(8)()
        model.load_weights(worker.disk / "first.weights.h5")
        model.save(worker.disk / "first.h5")
    worker.settings["start_from"] = "first.h5"


def note_weights(worker: Worker, model: keras.Model) -> None:
    total = sum(float(np.sum(np.abs(weight))) for weight in model.get_weights())
    (worker.directory / f"weights-{worker.index}").write_text(repr(total))


def directories_apart(worker: Worker) -> None:
    os.chdir(worker.disk)
    worker.run_dir = "run"


def damaged_record(worker: Worker) -> None:
    """A file of an earlier start that the chief alone reads."""
    run_dir = pathlib.Path(worker.run_dir)
    if not worker.is_second:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "rollbacks.json").write_text("{")


def evaluate_apart(worker: Worker) -> Callable[[], object]:
    """The chief alone has the weights."""
    os.chdir(worker.disk)
    if not worker.is_second:
        (worker.disk / "run" / "export").mkdir(parents=True)
        model_of(8)().save(worker.disk / "run" / "export" / "model.keras")
    settings = EvaluateSettings(
        model=worker.settings["model"],
        task=worker.settings["task"],
        data=examples,
        strategy=worker.strategy,
        global_batch_size=16,
    )
    return lambda: experiment.evaluate(settings, Request(run_dir="run"))


def compiled_model(worker: Worker) -> keras.Model:
    with worker.strategy.scope():
        model = model_of(8)()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def fit_with_unseeded_shuffle(worker: Worker) -> Callable[[], object]:
    model = compiled_model(worker)
    tf.random.set_seed(None)
    dataset = tf.data.Dataset.from_tensor_slices(examples()).shuffle(NUM_EXAMPLES).batch(16)
    return lambda: tfdist.fit(model, dataset, epochs=2, verbose=0)


class AtRandom(keras.utils.PyDataset):
    """Batches of rows that NumPy's own generator draws."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        rows = np.random.default_rng().permutation(NUM_EXAMPLES)[:16]
        return tuple(part[rows] for part in examples())


def fit_with_an_unseeded_pydataset(worker: Worker) -> Callable[[], object]:
    model = compiled_model(worker)
    return lambda: tfdist.fit(model, AtRandom(), epochs=2, verbose=0)


def fit_with_split_at_random(worker: Worker) -> Callable[[], object]:
    model = compiled_model(worker)
    rows = np.random.default_rng().permutation(NUM_EXAMPLES)[:48]
    return lambda: tfdist.fit(model, *(part[rows] for part in examples()), batch_size=16, verbose=0)


def fit_with_its_own_arrays(worker: Worker) -> Callable[[], object]:
    """The Horovod habit of giving each worker its share."""
    model = compiled_model(worker)
    return lambda: tfdist.fit(model, *(part[worker.index :: 2] for part in examples()), batch_size=16, verbose=0)


def fit_with_callbacks_of_the_chief(worker: Worker) -> Callable[[], object]:
    """Which trains: what a callback of one worker sees on all is agreed."""
    model = compiled_model(worker)
    seen: list[int] = []
    callbacks = [] if worker.is_second else [Acting("on_train_batch_end", lambda callback: seen.append(1))]

    def act() -> None:
        tfdist.fit(model, *examples(), batch_size=16, epochs=2, callbacks=callbacks, verbose=0)
        assert len(seen) == (0 if worker.is_second else 8), seen

    return act


def fit_after_a_failure(worker: Worker) -> Callable[[], object]:
    model = compiled_model(worker)
    callbacks = [Acting("on_epoch_begin", fail)] if worker.is_second else []

    def act() -> None:
        try:
            tfdist.fit(model, *examples(), batch_size=16, callbacks=callbacks, verbose=0)
        except ValueError as error:
            print(f"caught: {error}", flush=True)
        tfdist.fit(model, *examples(), batch_size=16, verbose=0)

    return act


ACTS: dict[str, Callable[[Worker], Callable[[], object] | None]] = {
    each.__name__: each
    for each in (
        *(
            other_setting,
            bad_id,
            bad_id_of_the_second,
            late_bad_id_of_the_second,
            start_from_of_one_disk,
            start_from_hdf5_of_one_disk,
        ),
        *(directories_apart, damaged_record, evaluate_apart, fit_with_unseeded_shuffle, fit_with_split_at_random),
        *(
            fit_with_an_unseeded_pydataset,
            fit_with_its_own_arrays,
            fit_with_callbacks_of_the_chief,
            fit_after_a_failure,
        ),
    )
}


def main(directory: str, cases: list[str]) -> int:
    strategy: Strategy = Horovod() if "HOROVOD_RANK" in os.environ else MultiWorker()
    strategy.connect()
    root = pathlib.Path(directory).resolve()
    return [run_case(case, Worker(strategy, root / case)) for case in cases][-1]


def run_case(case: str, worker: Worker) -> int:
    keras.backend.clear_session()
    status, message = 0, ""
    try:
        of_one = OF_THE_SECOND if worker.is_second else OF_THE_CHIEF
        worker.settings |= OF_BOTH.get(case, {}) | of_one.get(case, {})
        act = ACTS[case](worker) if case in ACTS else None
        train(worker) if act is None else act()
    except (Exception, SystemExit) as error:  # as tfdist.main does
        status, message, _ = failure_report.describe(error)
    (worker.directory / f"worker-{worker.index}.json").write_text(json.dumps({"status": status, "message": message}))
    print(f"{status}: {message}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
