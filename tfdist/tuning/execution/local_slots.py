"""The slots of this machine: a fixed number, each with its share of the processors and GPUs.

Trials are processes of `multiprocessing`'s fork server, which imports TensorFlow once for all of them. Invariant: each
leads a session of its own, and nothing of it outlives `close`, nor the process of the sweep, however that ends. Linux
and other systems with `fork` only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import NoReturn

import psutil

from tfdist.errors import EXIT_BUG, EXIT_USER_ERROR, TfdistError, UserError
from tfdist.launch.child import die_with_parent
from tfdist.launch.plan import worker_environment
from tfdist.launch.processes import (
    GPU_VARIABLE,
    OUT_OF_MEMORY,
    count_memory_kills,
    cpu_shares,
    deal,
    explain_kill,
    send_to_group,
    shell_status,
)
from tfdist.storage import files
from tfdist.strategies.cluster import environment
from tfdist.telemetry.run_directory import RunDirectory

PROGRAM = "tfdist.main"
LOG = "output.log"
_PLACED = re.compile(r"^\[launch\] Ray placed worker \d+ on ([^\s,]+?)(?:,|\.$)", re.MULTILINE)
_CAUSE = re.compile(r"^\[launch\] worker (\d+) ended with", re.MULTILINE)
_LOST = re.compile(r"^\[launch\] (worker \d+ (?:was lost|could not be started): .*)", re.MULTILINE)
_SHOWN_BYTES = 1 << 14

_LOST_STATUS = 255  # multiprocessing's, of a process whose end the fork server has not told
_NO_FORK_SERVER = (
    "The process that starts the trials was killed. What the trials saved is kept: the same command resumes from there."
)


@dataclasses.dataclass(frozen=True)
class TrialCommand:
    """The command that trains a trial.

    Attributes:
      arguments: of tfdist.main, but for what differs between trials.
      launch: flags of tfdist.launch, for trials of several workers, or on a cluster.
    """

    arguments: Sequence[str]
    launch: Sequence[str] = ()

    def build(self, directory: RunDirectory, parameters: Sequence[str]) -> list[str]:
        """Returns what follows `python -m` for the run of this directory with these gin statements."""
        path = directory.path
        if self.launch and not files.is_remote(path):
            path = os.path.abspath(path)  # a worker may start elsewhere
        own = [*self.arguments, *(f"--gin_param={each}" for each in parameters), f"--run_dir={path}"]
        return ["tfdist.launch", *self.launch, "--", *own] if self.launch else ["tfdist.main", *own]

    def find_cause(self, status: int, log: str) -> tuple[str, str]:
        """Why a trial ended: the lines of its log that tell it, of several workers those of the one to blame.

        Where only the end of a worker, or of the launcher, is known and not its reason, the second text says so.

        Raises:
          UserError: the launcher cannot start the workers of any trial.
        """
        if not self.launch:
            return log, ""
        cause, lost = _CAUSE.findall(log), _LOST.findall(log)
        prefix = f"[worker {cause[-1]}] " if cause else "[launch] "
        lines = [line.removeprefix(prefix) for line in log.splitlines() if line.startswith(prefix)]
        if not cause and status == EXIT_USER_ERROR:
            raise UserError("\n".join(lines))
        if not cause and status == EXIT_BUG:
            lost = [f"its launcher ended with status {status}"]
        is_explained = not lost or OUT_OF_MEMORY in lost[-1]
        return "\n".join([*lines, *lost]), "" if is_explained else lost[-1]


@dataclasses.dataclass(frozen=True)
class TrialExit:
    """A trial whose command ended.

    Attributes:
      name: of the trial.
      status: as a shell gives it, 128 + N for signal N.
      log: the end of what it wrote, and what is known of its end.
      lost: where nothing is known of its end: why.
      host: the node of a cluster that it ran on; None is this machine.
    """

    name: str
    status: int
    log: str
    seconds: float
    lost: str = ""
    host: str | None = None


@dataclasses.dataclass(frozen=True)
class _Running:
    """A trial; `log_begin` is where its log begins, `memory_kills` are those of the machine before."""

    process: BaseProcess
    name: str
    log: str
    log_begin: int
    started: float
    memory_kills: int


class LocalSlots:
    """A number of slots, each of which runs one trial, or its launcher, at a time.

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
        """The number of trials that could be started now."""
        return self._running.count(None)

    def start(self, directory: RunDirectory, parameters: Sequence[str]) -> None:
        """Starts a training of this directory, with these gin statements, in the next free slot."""
        number, name = self._running.index(None), os.path.basename(directory.path)
        log = self._find_log(name, directory)
        variables = worker_environment(environment.current(), keep_cluster=True)
        if self._gpus[number]:
            variables[GPU_VARIABLE] = ",".join(self._gpus[number])
        command = self._command.build(directory, parameters)
        arguments = (command, log, variables, self._cpus[number])
        log_begin = os.path.getsize(log) if os.path.exists(log) else 0
        process = multiprocessing.get_context("forkserver").Process(target=run_trial, args=arguments)
        try:
            with _without_main():
                process.start()
        except (EOFError, ConnectionError) as error:
            raise TfdistError(_NO_FORK_SERVER) from error
        self._running[number] = _Running(process, name, log, log_begin, time.monotonic(), count_memory_kills())

    def stop(self, name: str) -> None:
        """Lets a trial save and leave; does nothing where it has ended."""
        for run in self._running:
            if run is not None and run.name == name:
                run.process.terminate()

    def wait(self, seconds: float) -> None:
        """Waits so long at most for a trial to end."""
        sentinels = [run.process.sentinel for run in self._running if run is not None]
        if sentinels:
            connection.wait(sentinels, seconds)
        else:
            time.sleep(seconds)

    def collect(self) -> Iterator[TrialExit]:
        """The trials that ended since; does not wait. Raises TfdistError where no trial can be started any more."""
        for number, run in enumerate(self._running):
            if run is None or (returncode := run.process.exitcode) is None:
                continue
            if returncode == _LOST_STATUS and psutil.pid_exists(run.process.pid or 0):
                raise TfdistError(_NO_FORK_SERVER)
            self._kill(run)  # what it left behind
            run.process.close()
            self._running[number] = None
            status = shell_status(returncode)
            log, host = read_log(run.log, run.log_begin)
            log, lost = self._command.find_cause(status, log)
            log = f"{log.rstrip()}\n{explain_kill(status, run.memory_kills)}"
            yield TrialExit(run.name, status, log, time.monotonic() - run.started, lost, host)

    def close(self) -> None:
        """Kills what still runs, and waits until it has ended."""
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

    def _find_log(self, name: str, directory: RunDirectory) -> str:
        if not files.is_remote(directory.path):
            files.make_dirs(directory.path)
            return files.join(directory.path, LOG)
        if self._logs is None:
            self._logs = tempfile.TemporaryDirectory(prefix="tfdist-trials-")
        return os.path.join(self._logs.name, f"{name}.log")


def read_log(path: str, begin: int) -> tuple[str, str | None]:
    """Reads the end of what a process has written behind `begin`, and the node on which Ray has put it, if it did."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as log:
        end = max(begin, log.seek(0, os.SEEK_END) - _SHOWN_BYTES)
        log.seek(begin)
        placed = _PLACED.search(log.read(_SHOWN_BYTES).decode(errors="replace"))
        log.seek(end)
        return log.read().decode(errors="replace"), placed and placed[1]
    return "", None


def find_gpus() -> list[str]:
    """Returns the GPUs that TensorFlow sees, by their names in CUDA_VISIBLE_DEVICES."""
    import tensorflow as tf

    count = len(tf.config.list_physical_devices("GPU"))
    named = (environment.current().get(GPU_VARIABLE) or "").split(",")
    return named[:count] if len(named) >= count and all(named[:count]) else [str(index) for index in range(count)]


def run_trial(command: Sequence[str], log: str, variables: Mapping[str, str], cpus: Sequence[int]) -> NoReturn:
    """Becomes a trial, and ends the process.

    Args:
      command: what follows `python -m`.
      log: the file that gets what it writes, behind what is there.
      variables: its environment.
      cpus: that it may use; none: all.
    """
    status = EXIT_BUG
    try:
        os.setsid()
        _redirect(log)
        environment.change(dict.fromkeys(environment.current()) | dict(variables))
        if cpus:
            os.sched_setaffinity(0, cpus)
        module, *arguments = command
        if module != PROGRAM:  # the launcher's workers end with it
            die_with_parent(os.getppid())
            os.execv(sys.executable, [sys.executable, "-m", *command])
        threading.Thread(target=_end_with_sweep, name="tfdist-sweep", daemon=True).start()
        status = importlib.import_module(PROGRAM).main(arguments)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def start_fork_server() -> None:
    """Starts the process that forks trials, which imports TensorFlow at once, while this one continues."""
    forkserver.set_forkserver_preload([f"{__package__}.preload"])
    resource_tracker.ensure_running()  # now, as it unblocks signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # there, until it leads a session
    try:
        with _without_main():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keeps `multiprocessing` from importing this program in the new process, where a script would start again."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _end_with_sweep() -> None:
    sweep = multiprocessing.parent_process()
    assert sweep is not None
    connection.wait([sweep.sentinel])
    os.killpg(0, signal.SIGKILL)


def _redirect(log: str) -> None:
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for each in (nothing, output):
        os.close(each)
