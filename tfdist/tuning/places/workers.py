"""The places of this machine where trials run: a fixed number, each with its share of the processors and GPUs.

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

from tfdist.launch.processes import cpu_shares
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.places import group
from tfdist.tuning.places.fork_server import ForkServer
from tfdist.tuning.places.machine import GPU_VARIABLE, OUT_OF_MEMORY, memory_kills, shares
from tfdist.tuning.places.places import Ended, Next, Place, Setting, name_of
from tfdist.tuning.places.standby import Start
from tfdist.tuning.schedule.trial import EXIT_KILLED, read_log

LOG = "output.log"


@dataclasses.dataclass(frozen=True)
class _Running:
    """A process; `memory_kills` is what that counted before it began."""

    name: str
    log: str
    started: float
    memory_kills: int


class Workers:
    """The places.

    Args:
      fork_server: starts the processes.
      setting: how many, and what they run.
    """

    def __init__(self, fork_server: ForkServer, setting: Setting) -> None:
        count, gpus = setting.count, setting.gpus
        self._fork_server, self._setting = fork_server, setting
        self._cpus = cpu_shares(count) if count > 1 else [[]]
        self._gpus = shares(gpus, count) if gpus else [[]] * count
        self._running: list[_Running | None] = [None] * count
        self._logs: tempfile.TemporaryDirectory[str] | None = None
        self._built: dict[str, Next] = {}  # ahead, and not started yet
        self._building = ""  # the last of them

    def fileno(self) -> int:
        """Becomes readable when a process has ended."""
        return self._fork_server.fileno()

    @property
    def num_free(self) -> int:
        return self._running.count(None)

    @property
    def next_free(self) -> Place:
        """The place where the next process will run."""
        return Place(self._running.index(None))

    def start(self, directory: RunDirectory, parameters: Sequence[str]) -> None:
        """Starts a process, with these gin statements, in a free place."""
        number, name, log = self.next_free.number, name_of(directory), self._log(directory)
        self._running[number] = _Running(name, log, time.monotonic(), memory_kills())
        start = self._start_of(directory, parameters, log=log, worker=number)
        self._built.pop(name, None)
        self._building = "" if self._building == name else self._building
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
            on_ray=None if setting.on_ray is None else dataclasses.asdict(setting.on_ray),
        )

    def stop(self, directory: RunDirectory) -> None:
        """Lets a process save and leave."""
        self._fork_server.signal(name_of(directory), signal.SIGTERM)

    def ended(self) -> Iterator[Ended]:
        """The processes that ended since."""
        for name, status in self._fork_server.ended():
            number, run = next((n, run) for n, run in enumerate(self._running) if run is not None and run.name == name)
            self._running[number] = None
            log = read_log(run.log)
            if self._setting.processes > 1:
                log = group.cause_of(log)
            if status == EXIT_KILLED and memory_kills() > run.memory_kills:
                log = f"{log.rstrip()}\n{OUT_OF_MEMORY}"
            yield Ended(name, status, log, time.monotonic() - run.started)

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
