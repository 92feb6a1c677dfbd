"""What checkpoints cost: beside Keras's BackupAndRestore, beside no checkpoint, and beside plain reading.

202 MB of state (16.8 million weights and Adam's two slots). The stall is what the loop waits for at a checkpoint.
"following" trains on half of the cores, with and without an evaluator of its checkpoints on the other half.
Goodput is the share of an undisturbed run's steps that is left when the process is killed now and then: every 20 s with
epochs of some 5 s, or every 60 s with epochs of some two minutes. Takes half an hour.

    python benchmarks/checkpoint.py [--part=PART] [--quick] [--json=FILE]
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from goodput import measure_goodput
from measuring import Figure, choose_size, make_ratio, measure_part, report, take_samples, time_call
from trainings import build_training
from workloads import heavy_mlp, loss, metric, optimizer

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.checkpoint.policy import CheckpointPolicy, CheckpointSchedule
from tfdist.checkpoint.preemption import Preemption
from tfdist.checkpoint.write.manager import CheckpointManager
from tfdist.checkpoint.write.snapshot import view_arrays
from tfdist.strategies.one_device import OneDevice
from tfdist.training.recovery.recovery import Recovery, load_checkpoint
from tfdist.training.step.state import TrainingState

PARTS = ("stall", "writing", "restoring", "following", "goodput", "goodput_long")
ROUNDS = {"stall": (11, 5), "writing": (6, 3), "restoring": (9, 5), "following": (7, 3)}  # and with --quick
GOODPUT = {
    "goodput": (
        {"mean_seconds": 20, "num_kills": 10, "alone_seconds": 60, "steps_per_epoch": 50, "goal": 1.0},
        {"mean_seconds": 16, "num_kills": 1, "alone_seconds": 12, "steps_per_epoch": 50, "goal": 1.0},
    ),
    "goodput_long": (
        {"mean_seconds": 60, "num_kills": 5, "alone_seconds": 60, "steps_per_epoch": 1200, "goal": 2.0},
        {"mean_seconds": 60, "num_kills": 2, "alone_seconds": 60, "steps_per_epoch": 1200, "goal": 2.0},
    ),
}
SMOKE_GOODPUT = {"mean_seconds": 1, "num_kills": 1, "alone_seconds": 1, "steps_per_epoch": 4, "goal": 1.0}
THREADS = [(2,), (1,)]  # beside which a checkpoint is written
STEPS_BETWEEN = 2  # of training, before a stall is measured


def measure(parts: Sequence[str], *, quick: bool) -> Iterator[list[Figure]]:
    for part in parts:
        if part in GOODPUT:
            yield measure_goodput(**choose_size(GOODPUT[part][quick], SMOKE_GOODPUT))
            continue
        rounds = choose_size(ROUNDS[part][quick], 1)
        for threads in choose_size(THREADS, THREADS[:1]) if part == "writing" else [()]:
            yield measure_part("checkpoint", part, rounds, *threads)


class Told:
    """Takes the manager's events; a warning would make the figures mean something else."""

    def info(self, event: str, **details: Any) -> None:
        pass

    def warning(self, event: str, **details: Any) -> None:
        raise RuntimeError(f"{event}: {details}")


class Subject:
    """A training of tfdist's with its checkpoints in `directory`."""

    def __init__(self, directory: str, *, batch: int = 16) -> None:
        self.strategy = OneDevice()
        self.strategy.connect()
        learner, self.train = build_training(self.strategy, heavy_mlp(batch))
        self.directory = directory
        self.state = TrainingState(self.strategy, learner)
        self.manager = CheckpointManager(
            directory, CheckpointPolicy(keep_last=1, on_error="stop"), identity={}, tell=Told()
        )
        self._recovery = Recovery(
            strategy=self.strategy,
            state=self.state,
            manager=self.manager,
            schedule=CheckpointSchedule(CheckpointPolicy(), steps_per_epoch=1000),
            preemption=Preemption(tell=lambda message: None, metadata_address=None),
        )
        self._recovery.prepare()
        self._step = 0
        self.train(STEPS_BETWEEN)
        self.save()
        self.manager.wait()

    def save(self) -> float:
        """What the loop waits for, in seconds."""
        self._step += 1
        return time_call(self._recovery.save, self._step, {}, {}, {})

    @property
    def is_writing(self) -> bool:
        self.manager.check()
        return self.manager.last_committed_step != self._step


def stall(rounds: str) -> list[Figure]:
    """How long training waits for a checkpoint: tfdist's, beside Keras's BackupAndRestore in `fit`."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as directory:
        subject = Subject(f"{directory}/tfdist")
        keras_seconds = _build_keras_sample(f"{directory}/keras")

        def ours() -> float:
            subject.train(STEPS_BETWEEN)
            seconds = subject.save()
            subject.manager.wait()
            return seconds

        samples = take_samples([ours, keras_seconds, *_build_copies(subject.state.tensors())], int(rounds))
        own, theirs, *copies = samples
        best = min(copies, key=statistics.median)
        return [
            make_ratio(
                "stall of a checkpoint: tfdist ÷ BackupAndRestore", own, theirs, goal=0.06, unit="s", at_most=True
            ),
            make_ratio(
                "… ÷ the best copy of the same bytes, by 1, 2 or 4 threads", own, best, 1.1, unit="s", at_most=True
            ),
        ]


def _build_copies(tensors: Mapping[str, Any]) -> list[Callable[[], float]]:
    """Copies of as many bytes as these tensors have, into memory that exists, by 1, 2 and 4 threads."""
    num_bytes = sum(view.nbytes for view in view_arrays(tensors).values())
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)

    def copying(num_threads: int) -> Callable[[], float]:
        bounds = [num_bytes * i // num_threads for i in range(num_threads + 1)]
        pairs = [(target[a:b], source[a:b]) for a, b in itertools.pairwise(bounds)]
        threads = ThreadPoolExecutor(num_threads)

        def copy() -> None:
            for each in [threads.submit(np.copyto, *pair) for pair in pairs]:
                each.result()

        return lambda: time_call(copy)

    return [copying(n) for n in (1, 2, 4)]


def writing(rounds: str, num_threads: str) -> list[Figure]:
    """Steps while a checkpoint is written ÷ steps while none is, on so many threads."""
    tf.config.threading.set_intra_op_parallelism_threads(int(num_threads))
    tf.config.threading.set_inter_op_parallelism_threads(int(num_threads))
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as directory:
        subject = Subject(directory)
        during, before = [], []
        for _ in range(int(rounds)):
            step_seconds = _step_while_writing(subject)
            during.append(statistics.fmean(step_seconds))
            before.append(time_call(subject.train, len(step_seconds)) / len(step_seconds))
        threads = "one thread" if num_threads == "1" else f"{num_threads} threads"
        name = f"step while writing ÷ else, {threads}"
        return [make_ratio(name, during, before, 1.10, unit="s", at_most=True)]


def restoring(rounds: str) -> list[Figure]:
    """Restoring all variables, verified, ÷ reading the same files whole."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as directory:
        subject = Subject(directory)
        paths = sorted(Path(list_checkpoints(directory)[-1].path).iterdir())

        def ours() -> float:
            return time_call(_restore, subject)

        def plain() -> float:
            return time_call(lambda: [path.read_bytes() for path in paths])

        warm = take_samples([ours, plain], int(rounds))
        cold = take_samples([_evict_first(paths, ours), _evict_first(paths, plain)], int(rounds))
        name = "restore ÷ reading the files"
        return [
            make_ratio(f"{name}, from the disk", *cold, goal=1.3, unit="s", at_most=True),
            make_ratio(f"{name}, from the page cache", *warm, goal=1.3, unit="s", at_most=True),
        ]


def following(rounds: str) -> list[Figure]:
    """Training the digits while an evaluator follows ÷ without one."""
    cores = sorted(os.sched_getaffinity(0))
    own, others = cores[: len(cores) // 2] or cores, cores[len(cores) // 2 :]
    settings = (
        f"train.epochs = {choose_size(300, 4)}",
        "train.xla = 'off'",
        "train.checkpoint = @tfdist.CheckpointPolicy(every_epochs=20)",
        "train.eval_data = None",
        "evaluate.data = @test/sklearn_sets.load_digits",
    )
    gin = ["--gin_file=tfdist:experiments/digits.gin", *(f"--gin_param={each}" for each in settings)]

    def start(run_dir: str, processors: Sequence[int], *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tfdist.main", *gin, f"--run_dir={run_dir}", *flags]
        pin = functools.partial(os.sched_setaffinity, 0, processors)
        return subprocess.Popen(command, preexec_fn=pin, stdout=subprocess.DEVNULL)

    def sample(*, follows: bool) -> float:
        with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as run_dir:
            evaluator = start(run_dir, others, "--mode=evaluate", "--follow") if follows else None
            processes = [start(run_dir, own), *([evaluator] if evaluator else [])]
            if any(process.wait() for process in processes):
                raise RuntimeError("a process failed; its output says why")
            return json.loads(Path(run_dir, "result.json").read_text())["wall_seconds"]

    with_it, without = take_samples([lambda: sample(follows=True), lambda: sample(follows=False)], int(rounds))
    return [make_ratio("training with an evaluator ÷ without", with_it, without, 1.01, unit="s", at_most=True)]


def _build_keras_sample(directory: str) -> Callable[[], float]:
    """A function that trains two batches in `fit` and gives the seconds of the save after the second one."""
    workload = heavy_mlp()
    model = workload.build_model()
    model.compile(optimizer=optimizer(), loss=loss(), metrics=[metric()])
    num_examples = workload.global_batch_size * STEPS_BETWEEN
    x, y = (array[:num_examples] for array in workload.arrays())
    callback = _TimedCheckpoint(directory, save_freq=STEPS_BETWEEN, delete_checkpoint=False)

    def sample() -> float:
        shutil.rmtree(directory, ignore_errors=True)  # else it would load, and find its epoch done
        model.fit(x, y, batch_size=workload.global_batch_size, verbose=0, callbacks=[callback])
        return callback.seconds

    sample()
    return sample


class _TimedCheckpoint(keras.callbacks.BackupAndRestore):
    seconds = 0.0

    def _save_model(self) -> None:
        self.seconds = time_call(super()._save_model)


def _step_while_writing(subject: Subject) -> list[float]:
    """The steps that were done wholly while a checkpoint was being written, in seconds each."""
    seconds: list[float] = []
    while not seconds:
        subject.train(STEPS_BETWEEN)
        subject.save()
        while subject.is_writing:
            taken = time_call(subject.train, 1)
            if subject.is_writing:
                seconds.append(taken)
    subject.manager.wait()
    return seconds


def _restore(subject: Subject) -> None:
    checkpoint = load_checkpoint(
        subject.strategy,
        subject.state,
        lambda: restore.load_newest(subject.directory, tell=Told()),
        partial=False,
        tell=Told(),
    )
    assert checkpoint is not None
    checkpoint.restore()


def _evict_first(paths: Sequence[Path], sample: Callable[[], float]) -> Callable[[], float]:
    """`sample` with the files no longer in the page cache, as far as the system follows the advice."""

    def run() -> float:
        for path in paths:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return sample()

    return run


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, has_quick=True)
