"""Trains for an epoch on digits in a file of records, some of which may be corrupt.

    python -m training.unreadable DIRECTORY STRATEGY FILE [KILLS]

STRATEGY: as in equivalence/cases.py. KILLS: whether a worker dies, once, when the run has gone on after a failure.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from equivalence.cases import BASE, STRATEGIES, digits
from record_files_support import example, write_records

from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.data.sources.columns import Columns
from tfdist.experiment import train
from tfdist.training.recovery.rollback import Rollback
from tfdist.training.run.run import Request
from tfdist.training.run.settings import TrainSettings


def write_digits(path: pathlib.Path, corrupt: Sequence[int] = ()) -> pathlib.Path:
    """448 digits, a record each, of which those with these numbers have a wrong byte."""
    images, labels = digits(448)
    records = [example(x=image.tolist(), y=int(label)) for image, label in zip(images, labels, strict=True)]
    write_records(path, records)
    data, size = bytearray(path.read_bytes()), path.stat().st_size // len(records)
    assert size * len(records) == len(data)
    for number in corrupt:
        data[number * size + size // 2] ^= 0xFF
    path.write_bytes(data)
    return path


def source(path: str) -> TFRecordSource:
    features = {"x": tf.io.FixedLenFeature((64,), tf.float32), "y": tf.io.FixedLenFeature((), tf.int64)}
    return TFRecordSource(files=str(path), features=features, columns=Columns(inputs="x", targets="y"))


def settings(path: pathlib.Path, *, epochs: int = 2) -> dict[str, Any]:
    return BASE | {
        "epochs": epochs,
        "train_data": functools.partial(source, str(path)),
        "eval_data": None,
        "on_divergence": Rollback(),
    }


class Dies(keras.callbacks.Callback):
    """Kills the first worker that comes to two steps after the run has gone on; no other one, and never again."""

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__()
        self._directory, self._steps = directory, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps == 2 and (self._directory / "rollbacks.json").exists():
            with contextlib.suppress(FileExistsError):
                (self._directory / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str, strategy_name: str, path: str, kills: str = "") -> None:
    strategy = STRATEGIES[strategy_name]()
    given = settings(pathlib.Path(path), epochs=1) | {"strategy": strategy}
    given["callbacks"] = [Dies(pathlib.Path(directory))] if kills else []
    given["task"] = given["task"]()
    train(TrainSettings(**given), Request(run_dir=directory))


if __name__ == "__main__":
    from tfdist.command_line import exit_status_of

    sys.exit(exit_status_of(lambda: main(*sys.argv[1:])))
