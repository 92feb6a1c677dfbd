"""The places where trials run: on this machine, a fixed number, each with its share of the processors and GPUs.

Invariant: a place runs one process at a time, and no process outlives `close`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from tfdist.launch.processes import cpu_shares
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.schedule import group
from tfdist.tuning.schedule.devices import GPU_VARIABLE, shares
from tfdist.tuning.schedule.fork_server import ForkServer
from tfdist.tuning.schedule.memory_kills import OUT_OF_MEMORY, memory_kills
from tfdist.tuning.schedule.standby import Start
from tfdist.tuning.schedule.trial import EXIT_KILLED, SeedRun, Trial, read_log
from tfdist.tuning.search.trial_settings import TrialSettings

LOG = "output.log"


class Work(Protocol):
    """What a place runs: the run of a directory, whose last name is its own; `worker` and the rest once it runs."""

    worker: int
    log: str
    started: float
    memory_kills: int

    @property
    def directory(self) -> RunDirectory: ...


@dataclasses.dataclass
class Job:
    """The run of one seed of a trial; `worker`, `log` and `started` once it runs."""

    trial: Trial
    run: SeedRun
    worker: int = 0
    log: str = ""
    started: float = 0.0
    memory_kills: int = 0

    @property
    def directory(self) -> RunDirectory:
        return self.run.directory

    @property
    def key(self) -> str:
        return key_of(self)

    @property
    def settings(self) -> TrialSettings:
        """What tells the run from others."""
        epochs = self.trial.epochs if self.trial.is_partial else None
        return TrialSettings(self.trial.values, self.run.seed, epochs)


Each = TypeVar("Each", bound=Work)


@dataclasses.dataclass(frozen=True)
class Ended(Generic[Each]):
    """A process that ended.

    Attributes:
      lost: where nothing is known of its end: why.
    """

    job: Each
    status: int
    log: str
    seconds: float
    lost: str = ""


@dataclasses.dataclass(frozen=True)
class Next:
    """What will be started next: a run's directory and gin statements; `is_new` where it has none of its own yet."""

    directory: RunDirectory
    parameters: Sequence[str]
    is_new: bool


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a trial is to run; `host` names another machine's worker, None is this one."""

    number: int
    host: str | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the places of this machine are.

    Attributes:
      arguments: of the command that trains, but for what differs between trials.
      count: of places.
      gpus: what CUDA_VISIBLE_DEVICES calls the GPUs; none leaves it alone.
      hidden: variables that trials do not see.
      processes: of one trial.
      launcher: of several processes.
      builds_ahead: whether the next trial may be built while others train.
    """

    arguments: Sequence[str]
    count: int
    gpus: Sequence[str] = ()
    hidden: Sequence[str] = ()
    processes: int = 1
    launcher: str = ""
    builds_ahead: bool = False


class Workers(Generic[Each]):
    """The places.

    Args:
      fork_server: starts the processes.
      setting: how many, and what they run.
    """

    def __init__(self, fork_server: ForkServer, setting: Setting) -> None:
        count, gpus = setting.count, setting.gpus
        self._fork_server, self._setting = fork_server, setting
        self._cpus = cpu_shares(count) if count > 1 else [[]]
        self._gpus = shares(gpus, count) if gpus and count else [[]] * count
        self._jobs: list[Each | None] = [None] * count
        self._logs: tempfile.TemporaryDirectory[str] | None = None
        self._built: dict[str, Next] = {}  # ahead, and not started yet
        self._building = ""  # the last of them

    def fileno(self) -> int:
        """Becomes readable when a process has ended."""
        return self._fork_server.fileno()

    @property
    def num_places(self) -> int:
        return len(self._jobs)

    @property
    def num_free(self) -> int:
        return self._jobs.count(None)

    @property
    def next_free(self) -> Place:
        """The place where the next process will run."""
        return Place(self._jobs.index(None))

    @property
    def running(self) -> list[Each]:
        return [job for job in self._jobs if job is not None]

    def start(self, job: Each, parameters: Sequence[str]) -> None:
        """Starts a process, with these gin statements, in a free place."""
        job.worker = self.next_free.number
        job.log, job.started, job.memory_kills = self._log(job.directory), time.monotonic(), memory_kills()
        self._jobs[job.worker] = job
        start = self._start_of(job.directory, parameters, log=job.log, worker=job.worker)
        self._built.pop(start.name, None)
        self._building = "" if self._building == start.name else self._building
        self._fork_server.start(start)
        if self._setting.processes == 1:
            self._fork_server.prepare(start)  # for the next trial here

    def build(self, upcoming: Next) -> None:
        """Has the process of what will be started next continue to its first step, while others train.

        A place with GPUs of its own could not change them any more, and several processes find each other as they
        start: nothing is built for those.
        """
        setting = self._setting
        possible = setting.builds_ahead and setting.processes == 1 and not setting.gpus
        name = name_of(upcoming.directory)
        if possible and name != self._building:
            self._building, self._built[name] = name, upcoming
            self._fork_server.build(self._start_of(upcoming.directory, upcoming.parameters, log=os.devnull))

    def _start_of(self, directory: RunDirectory, parameters: Sequence[str], *, log: str, worker: int = 0) -> Start:
        gpus, setting = self._gpus[worker], self._setting
        given = [f"--gin_param={statement}" for statement in parameters]
        return Start(
            name=name_of(directory),
            arguments=[*setting.arguments, *given, f"--run_dir={directory.path}"],
            log=log,
            environment=dict.fromkeys(setting.hidden) | ({GPU_VARIABLE: ",".join(gpus)} if gpus else {}),
            cpus=self._cpus[worker],
            place=str(worker),
            processes=setting.processes,
            launcher=setting.launcher,
        )

    def stop(self, job: Each) -> None:
        """Lets a process save and leave."""
        self._fork_server.signal(key_of(job), signal.SIGTERM)

    def kill(self, job: Each) -> None:
        """Ends a process at once."""
        self._fork_server.signal(key_of(job), signal.SIGKILL)

    def ended(self) -> Iterator[Ended[Each]]:
        """The processes that ended since."""
        for key, status in self._fork_server.ended():
            job = next(job for job in self.running if key_of(job) == key)
            self._jobs[job.worker] = None
            log = read_log(job.log)
            if self._setting.processes > 1:
                log = group.cause_of(log)
            if status == EXIT_KILLED and memory_kills() > job.memory_kills:
                log = f"{log.rstrip()}\n{OUT_OF_MEMORY}"
            yield Ended(job, status, log, time.monotonic() - job.started)

    def dismiss(self, status: int, message: str) -> None:
        """Tells who waits for trials that there will be none; here nobody does."""

    def close(self) -> None:
        """Kills what still runs, and leaves nothing of a trial that was built and not begun."""
        self._fork_server.close()
        for upcoming in self._built.values():
            if upcoming.is_new:
                with contextlib.suppress(OSError):  # untidy, but harmless
                    files.remove_tree(upcoming.directory.path)
        if self._logs is not None:
            self._logs.cleanup()

    def _log(self, directory: RunDirectory) -> str:
        if not files.is_remote(directory.path):
            files.make_dirs(directory.path)
            return files.join(directory.path, LOG)
        if self._logs is None:
            self._logs = tempfile.TemporaryDirectory(prefix="tfdist-trials-")
        return os.path.join(self._logs.name, f"{name_of(directory)}.log")


def key_of(work: Work) -> str:
    """The name of its directory."""
    return name_of(work.directory)


def name_of(directory: RunDirectory) -> str:
    """The last part of its path, which no other run of the sweep has."""
    return os.path.basename(directory.path)
