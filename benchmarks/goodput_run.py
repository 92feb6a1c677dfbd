"""One process of the goodput measurement: trains until it is killed, and keeps telling how far it is.

    python goodput_run.py tfdist|keras RUN_DIR PROGRESS_FILE MEAN_SECONDS STEPS_PER_EPOCH

MEAN_SECONDS: between failures, for tfdist's interval of checkpoints; 0 makes none.

The moment at which the model is about to be built goes to the first eight bytes of PROGRESS_FILE, the number of steps
done to the next eight. Everything after that moment counts: building, restoring, tracing, training and saving.
"""

from __future__ import annotations

import os
import struct
import sys
import time

import keras
from workloads import Workload, heavy_mlp, loss, metric, optimizer

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.data.sources.arrays import ArraySource
from tfdist.experiment import train
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.training.run.request import Request
from tfdist.training.run.settings import TrainSettings

ENDLESS = 10**6  # epochs


class Progress(keras.callbacks.Callback):
    """Keeps the number of steps done in a file: by the epoch and batch for Keras, whose count of updates continues when
    it does an epoch again, and by the updates for tfdist, which does not see where in an epoch it continues."""

    def __init__(self, path: str, *, steps_per_epoch: int, by_batch: bool) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT)
        self._steps_per_epoch = steps_per_epoch
        self._by_batch = by_batch
        self._epoch = 0

    def started(self) -> None:
        os.pwrite(self._file, struct.pack("d", time.time()), 0)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        by_batch = self._epoch * self._steps_per_epoch + batch + 1
        step = by_batch if self._by_batch else int(self.model.optimizer.iterations.numpy())
        os.pwrite(self._file, struct.pack("q", step), 8)


def run_tfdist(workload: Workload, directory: str, progress: Progress, mean_seconds: float) -> None:
    def build_model() -> keras.Model:
        progress.started()
        return workload.build_model()

    settings = TrainSettings(
        model=build_model,
        optimizer=optimizer,
        task=Supervised(loss=loss(), metrics=[metric]),
        train_data=lambda: ArraySource(workload.arrays()),
        strategy=OneDevice(),
        global_batch_size=workload.global_batch_size,
        epochs=ENDLESS,
        callbacks=[progress],
        checkpoint=CheckpointPolicy(mean_seconds_between_failures=mean_seconds) if mean_seconds else "off",
    )
    train(settings, Request(run_dir=directory))


def run_keras(workload: Workload, directory: str, progress: Progress, mean_seconds: float) -> None:
    x, y = workload.arrays()
    progress.started()
    model = workload.build_model()
    model.compile(optimizer=optimizer(), loss=loss(), metrics=[metric()])
    callbacks = [progress, keras.callbacks.BackupAndRestore(directory)] if mean_seconds else [progress]
    model.fit(x, y, batch_size=workload.global_batch_size, epochs=ENDLESS, verbose=0, callbacks=callbacks)


def main(who: str, directory: str, progress_path: str, mean_seconds: str, steps_per_epoch: str) -> None:
    steps = int(steps_per_epoch)
    workload = heavy_mlp(num_examples=16 * steps)
    progress = Progress(progress_path, steps_per_epoch=steps, by_batch=who == "keras")
    run = {"tfdist": run_tfdist, "keras": run_keras}[who]
    run(workload, directory, progress, float(mean_seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
