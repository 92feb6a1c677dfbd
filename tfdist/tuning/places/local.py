"""The slots of this machine: a fixed number, each with its share of the processors and GPUs.

Trials are processes of `multiprocessing`'s fork server, which imports TensorFlow once for all of them. Invariant: no
process of a trial outlives `close`, nor the process of the sweep.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from tfdist.errors import TfdistError
from tfdist.launch.processes import GPU_VARIABLE, cpu_shares, deal, send_to_group, shell_status
from tfdist.storage import files
from tfdist.strategies.cluster import environment
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.places import trial_process
from tfdist.tuning.places.trials import (
    LOG,
    TrialCommand,
    TrialExit,
    count_memory_kills,
    explain_kill,
    name_of,
    trial_environment,
)
from tfdist.tuning.schedule.trial import read_log

_LOST_STATUS = 255  # multiprocessing's, of a process whose end the fork server has not told
_NO_FORK_SERVER = (
    "The process that starts the trials was killed. What the trials saved is kept: the same command resumes from there."
)


@dataclasses.dataclass(frozen=True)
class _Running:
    """A trial; `memory_kills` are those of the machine before it began."""

    process: BaseProcess
    name: str
    log: str
    started: float
    memory_kills: int


class LocalExecutor:
    """Trials on this machine.

    Args:
      command: of each.
      count: of slots.
      gpus: what CUDA_VISIBLE_DEVICES calls the GPUs to be dealt; none leaves it alone.
    """

    def __init__(self, command: TrialCommand, count: int, *, gpus: Sequence[str]) -> None:
        self._command = command
        self._cpus = cpu_shares(count) if count > 1 else [[]] * count
        self._gpus = deal(gpus, count) if gpus else [[]] * count
        self._running: list[_Running | None] = [None] * count
        self._logs: tempfile.TemporaryDirectory[str] | None = None

    @property
    def num_free(self) -> int:
        return self._running.count(None)

    @property
    def next_host(self) -> None:
        return None

    def start(self, directory: RunDirectory, parameters: Sequence[str]) -> None:
        """Starts a training in the next free slot."""
        number, log = self._running.index(None), self._log(directory)
        gpus = {GPU_VARIABLE: ",".join(self._gpus[number])} if self._gpus[number] else {}
        command = self._command.build(directory, parameters)
        given = (command, log, trial_environment() | gpus, self._cpus[number])
        process = multiprocessing.get_context("forkserver").Process(target=trial_process.run, args=given)
        try:
            with trial_process.without_main():
                process.start()
        except (EOFError, ConnectionError) as error:
            raise TfdistError(_NO_FORK_SERVER) from error
        self._running[number] = _Running(process, name_of(directory), log, time.monotonic(), count_memory_kills())

    def stop(self, directory: RunDirectory) -> None:
        """Lets a trial save and leave."""
        for run in self._running:
            if run is not None and run.name == name_of(directory):
                run.process.terminate()

    def wait(self, seconds: float) -> None:
        """Waits so long at most for a trial to end."""
        sentinels = [run.process.sentinel for run in self._running if run is not None]
        if sentinels:
            connection.wait(sentinels, seconds)
        else:
            time.sleep(seconds)

    def collect(self) -> Iterator[TrialExit]:
        """The trials that ended since.

        Raises:
          TfdistError: the fork server is gone.
        """
        for number, run in enumerate(self._running):
            if run is None or (returncode := run.process.exitcode) is None:
                continue
            if returncode == _LOST_STATUS and _exists(run.process.pid):
                raise TfdistError(_NO_FORK_SERVER)
            self._kill(run)  # what it left behind
            run.process.close()
            self._running[number] = None
            status = shell_status(returncode)
            log = explain_kill(status, self._command.find_cause(read_log(run.log)), run.memory_kills)
            yield TrialExit(run.name, status, log, time.monotonic() - run.started)

    def close(self) -> None:
        """Kills what still runs."""
        left = [run for run in self._running if run is not None]
        for run in left:
            self._kill(run)
        for run in left:
            run.process.join()
        if self._logs is not None:
            self._logs.cleanup()

    def _kill(self, run: _Running) -> None:
        pid = run.process.pid
        assert pid is not None
        send_to_group(pid, signal.SIGKILL)
        run.process.kill()  # which may not lead its group yet

    def _log(self, directory: RunDirectory) -> str:
        if not files.is_remote(directory.path):
            files.make_dirs(directory.path)
            return files.join(directory.path, LOG)
        if self._logs is None:
            self._logs = tempfile.TemporaryDirectory(prefix="tfdist-trials-")
        return os.path.join(self._logs.name, f"{name_of(directory)}.log")


def find_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that TensorFlow sees."""
    import tensorflow as tf

    count = len(tf.config.list_physical_devices("GPU"))
    named = (environment.current().get(GPU_VARIABLE) or "").split(",")
    return named[:count] if len(named) >= count and all(named[:count]) else [str(index) for index in range(count)]


def _exists(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    return True
