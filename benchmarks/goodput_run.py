"""One process of the goodput measurement: trains until it is killed, and keeps telling how far it is.

    python goodput_run.py tfdist|keras RUN_DIR PROGRESS_FILE checkpoint|none

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
from tfdist.training.run.run import Request
from tfdist.training.run.settings import TrainSettings

STEPS_PER_EPOCH = 50
SECONDS_BETWEEN_CHECKPOINTS = 3.0  # of tfdist's; about what its automatic interval comes to
ENDLESS = 10**6  # epochs


class Progress(keras.callbacks.Callback):
    """Keeps the number of steps done in a file: by the epoch and batch for Keras, whose count of updates continues when
    it does an epoch again, and by the updates for tfdist, which does not see where in an epoch it continues."""

    def __init__(self, path: str, *, by_batch: bool) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT)
        self._by_batch = by_batch
        self._epoch = 0

    def started(self) -> None:
        os.pwrite(self._file, struct.pack("d", time.time()), 0)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        by_batch = self._epoch * STEPS_PER_EPOCH + batch + 1
        step = by_batch if self._by_batch else int(self.model.optimizer.iterations.numpy())
        os.pwrite(self._file, struct.pack("q", step), 8)


def run_tfdist(workload: Workload, directory: str, progress: Progress, saves: bool) -> None:
    def build_model() -> keras.Model:
        progress.started()
        return workload.build_model()

    policy = CheckpointPolicy(every_seconds=SECONDS_BETWEEN_CHECKPOINTS, keep_last=2)
    settings = TrainSettings(
        model=build_model,
        optimizer=optimizer,
        task=Supervised(loss=loss(), metrics=[metric]),
        train_data=lambda: ArraySource(workload.arrays()),
        strategy=OneDevice(),
        global_batch_size=workload.global_batch_size,
        epochs=ENDLESS,
        callbacks=[progress],
        checkpoint=policy if saves else "off",
    )
    train(settings, Request(run_dir=directory))


def run_keras(workload: Workload, directory: str, progress: Progress, saves: bool) -> None:
    x, y = workload.arrays()
    progress.started()
    model = workload.build_model()
    model.compile(optimizer=optimizer(), loss=loss(), metrics=[metric()])
    callbacks = [progress, keras.callbacks.BackupAndRestore(directory)] if saves else [progress]
    model.fit(x, y, batch_size=workload.global_batch_size, epochs=ENDLESS, verbose=0, callbacks=callbacks)


def main(who: str, directory: str, progress_path: str, checkpoint: str) -> None:
    workload = heavy_mlp(num_examples=16 * STEPS_PER_EPOCH)
    progress = Progress(progress_path, by_batch=who == "keras")
    run = {"tfdist": run_tfdist, "keras": run_keras}[who]
    run(workload, directory, progress, checkpoint == "checkpoint")


if __name__ == "__main__":
    main(*sys.argv[1:])
