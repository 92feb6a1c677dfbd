"""The places where trials run: on this machine, a fixed number, each with its share of the processors and GPUs.

Invariant: a place runs one process at a time, and no process outlives `close`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence

from tfdist.launch.processes import cpu_shares
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.nursery import Nursery, Start
from tfdist.tuning.trial import SeedRun, Trial, read_log

LOG = "output.log"


@dataclasses.dataclass
class Job:
    """The run of one seed of a trial; `worker`, `log` and `started` once it runs."""

    trial: Trial
    run: SeedRun
    worker: int = 0
    log: str = ""
    started: float = 0.0

    @property
    def key(self) -> str:
        return os.path.basename(self.run.directory.path)


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that ended."""

    job: Job
    status: int
    log: str
    seconds: float


class Workers:
    """The places.

    Args:
      nursery: starts the processes.
      count: of places.
      gpus: what CUDA_VISIBLE_DEVICES calls the GPUs; with one place it is left alone.
    """

    def __init__(self, nursery: Nursery, count: int, gpus: Sequence[str] = ()) -> None:
        self._nursery = nursery
        self._cpus = cpu_shares(count) if count > 1 else [[]]
        self._gpus = shares(gpus, count) if gpus and count > 1 else [[]] * count
        self._jobs: list[Job | None] = [None] * count
        self._logs: tempfile.TemporaryDirectory[str] | None = None

    def fileno(self) -> int:
        """Becomes readable when a process has ended."""
        return self._nursery.fileno()

    @property
    def num_free(self) -> int:
        return self._jobs.count(None)

    @property
    def next_free(self) -> int:
        """The place where the next process will run."""
        return self._jobs.index(None)

    @property
    def running(self) -> list[Job]:
        return [job for job in self._jobs if job is not None]

    def start(self, job: Job, arguments: Sequence[str]) -> None:
        """Starts a process in a free place."""
        job.worker = self.next_free
        job.log, job.started = self._log(job.run.directory), time.monotonic()
        self._jobs[job.worker] = job
        gpus = self._gpus[job.worker]
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        start = Start(job.key, arguments, job.log, devices, self._cpus[job.worker], place=str(job.worker))
        self._nursery.start(start)
        self._nursery.prepare(start)  # for the next trial here

    def stop(self, job: Job) -> None:
        """Lets a process save and leave."""
        self._nursery.signal(job.key, signal.SIGTERM)

    def ended(self) -> Iterator[Ended]:
        """The processes that ended since."""
        for key, status in self._nursery.ended():
            job = next(job for job in self.running if job.key == key)
            self._jobs[job.worker] = None
            yield Ended(job, status, read_log(job.log), time.monotonic() - job.started)

    def close(self) -> None:
        """Kills what still runs."""
        self._nursery.close()
        if self._logs is not None:
            self._logs.cleanup()

    def _log(self, directory: RunDirectory) -> str:
        if not files.is_remote(directory.path):
            files.make_dirs(directory.path)
            return files.join(directory.path, LOG)
        if self._logs is None:
            self._logs = tempfile.TemporaryDirectory(prefix="tfdist-trials-")
        return os.path.join(self._logs.name, f"{os.path.basename(directory.path)}.log")


def shares(devices: Sequence[str], count: int) -> list[list[str]]:
    """The devices dealt to `count` places in equal parts; one is shared only if there are too few."""
    if count > len(devices):
        return [[devices[index % len(devices)]] for index in range(count)]
    size = len(devices) // count
    return [list(devices[index * size : (index + 1) * size]) for index in range(count)]
