"""Goodput under kills: the share of an undisturbed run's steps that is left when the process is killed now and then.

Used by checkpoint.py. Time counts from the moment at which a process is about to build its model: starting Python and
importing TensorFlow takes the same for both, and as long as a tenth of the time between two kills here. As a command it
is one process, which trains until it is killed, and keeps telling how far it is: in the first eight bytes of a file the
moment, in the next eight the number of steps done.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras
from measuring import Figure, build_environment, choose_size
from workloads import Workload, heavy_mlp, loss, metric, optimizer

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.data.sources.arrays import ArraySource
from tfdist.experiment import train
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TrainSettings
from tfdist.xla_cache import keep_compiled

_START_SECONDS = 120.0  # until a process builds its model, at most
_POLL_SECONDS = 0.02
ENDLESS = 10**6  # epochs
LEAST_STEPS = choose_size(0, 1)  # without one there would be nothing to divide by


def measure_goodput(
    *, mean_seconds: float, num_kills: int, alone_seconds: float, steps_per_epoch: int, goal: float
) -> list[Figure]:
    """tfdist's goodput, and the same ÷ that of `fit` with BackupAndRestore, under SIGKILL after the same random times.

    Args:
      mean_seconds: between kills, each of them between half and one and a half of it; tfdist is told.
      num_kills: the last one ends the measurement.
      alone_seconds: how long the undisturbed runs are; they are extrapolated from the speed of their second half.
      steps_per_epoch: after each of which BackupAndRestore saves.
      goal: of the ratio.
    """
    drawn = random.Random(1)
    lives = [mean_seconds * drawn.uniform(0.5, 1.5) for _ in range(num_kills)]
    shares = {
        who: _measure_share(who, lives, alone_seconds, mean_seconds, steps_per_epoch) for who in ("tfdist", "keras")
    }
    ratio = shares["tfdist"] / shares["keras"] if shares["keras"] else float("inf")
    name = f"goodput, {num_kills} kills, one every {mean_seconds:g} s, epochs of {steps_per_epoch} steps"
    own = shares["tfdist"]
    return [
        Figure(f"{name}: tfdist ÷ BackupAndRestore", ratio, goal, (ratio, ratio), own, shares["keras"], "of steps"),
        Figure(f"{name}: tfdist ÷ undisturbed", own, 0.9, (own, own), own, 1.0, "of steps"),
    ]


class _NotResumableError(Exception):
    """A process ended by itself; with the end of what it printed."""


def _measure_share(
    who: str, lives: list[float], alone_seconds: float, mean_seconds: float, steps_per_epoch: int
) -> float:
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        half, whole = _run_life(who, scratch, [alone_seconds / 2, alone_seconds], 0, steps_per_epoch)
        rate = (whole - half) / (alone_seconds / 2)
        undisturbed = whole + rate * (sum(lives) - alone_seconds)
        done, lost = 0, 0
        for seconds in lives:
            try:
                (done,) = _run_life(who, scratch, [seconds], mean_seconds, steps_per_epoch)
            except _NotResumableError as error:  # then a user begins anew
                if not (Path(scratch) / "run").exists():
                    raise
                print(f"{who} ended by itself:\n{error}")
                lost += 1
                shutil.rmtree(Path(scratch) / "run")
                (done,) = _run_life(who, scratch, [seconds], mean_seconds, steps_per_epoch)
        told = f", {lost} times not resumable" if lost else ""
        print(f"{who}: {done:,} of {undisturbed:,.0f} steps in {sum(lives):.0f} s with {len(lives)} kills{told}")
        return done / undisturbed


def _run_life(who: str, scratch: str, seconds: list[float], mean_seconds: float, steps_per_epoch: int) -> list[int]:
    """The steps done after so many seconds; the process is killed after the last of them.

    Raises _NotResumableError when it ended before.
    """
    progress = Path(scratch) / "progress"
    progress.unlink(missing_ok=True)
    command = [sys.executable, __file__, who, str(Path(scratch) / "run"), str(progress)]
    environment = build_environment(TF_CPP_MIN_LOG_LEVEL="3")
    if who == "tfdist":
        keep_compiled(str(Path(scratch) / "run"), environment)  # as tfdist.main does
    with open(Path(scratch) / "output", "w+") as output:
        process = subprocess.Popen(
            [*command, str(mean_seconds), str(steps_per_epoch)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            begun = _wait_for_start(process, progress)
            done = []
            for moment in seconds:
                while (time.time() < begun + moment or _read_steps(progress) < LEAST_STEPS) and process.poll() is None:
                    time.sleep(_POLL_SECONDS)
                done.append(_read_steps(progress))
            if process.poll() is not None:
                output.seek(0)
                raise _NotResumableError(output.read()[-2000:])
            return done
        finally:
            process.kill()
            process.wait()


def _wait_for_start(process: subprocess.Popen[bytes], progress: Path) -> float:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if progress.exists() and len(data := progress.read_bytes()) >= 8:
            return struct.unpack("d", data[:8])[0]
        time.sleep(_POLL_SECONDS)
    return time.time()


def _read_steps(progress: Path) -> int:
    data = progress.read_bytes() if progress.exists() else b""
    return struct.unpack("q", data[8:16])[0] if len(data) >= 16 else 0


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


def run(who: str, directory: str, progress_path: str, mean_seconds: str, steps_per_epoch: str) -> None:
    """Trains until it is killed; `mean_seconds` between failures are for tfdist's checkpoints, 0 makes none."""
    steps = int(steps_per_epoch)
    workload = heavy_mlp(num_examples=16 * steps)
    progress = Progress(progress_path, steps_per_epoch=steps, by_batch=who == "keras")
    {"tfdist": run_tfdist, "keras": run_keras}[who](workload, directory, progress, float(mean_seconds))


if __name__ == "__main__":
    run(*sys.argv[1:])
