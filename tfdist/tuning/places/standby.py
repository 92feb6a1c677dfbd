"""A process that is ready before there is a trial for it, and waits to be told: imported, or built to its first step.

Invariant: what it writes while it waits is kept, and comes first in the log of the trial that it becomes. Both ends of
the line are here: `Standby` is the fork server's, `Waiting` the process's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.processes import send_to_group

BUILD, BEGIN = "build", "begin"


@dataclasses.dataclass(frozen=True)
class Start:
    """A process to be started.

    Attributes:
      name: what its end will be reported under.
      arguments: of the command.
      log: the file that gets what it writes, behind what is there.
      environment: variables to set; None takes one out.
      cpus: that it may use; none: all.
      place: a process that was prepared under this name is taken, if there is one.
      processes: how many make up the run.
      launcher: of several: how they find each other, one of `group.py`.
      on_ray: of several on a Ray cluster: what that sets aside for each, as `Resources`; None: they run here.
    """

    name: str
    arguments: Sequence[str]
    log: str
    environment: Mapping[str, str | None]
    cpus: Sequence[int] = ()
    place: str = ""
    processes: int = 1
    launcher: str = ""
    on_ray: Mapping[str, Any] | None = None


@dataclasses.dataclass
class Standby:
    """A process that is ready, or about to be, and waits on the other end of `line`.

    Attributes:
      building: the trial that it was told to build.
    """

    pid: int
    line: socket.socket
    building: Start | None = None

    def build(self, start: Start) -> None:
        """Has it build a trial, and wait before the first step; does nothing where it has ended."""
        if self._tell(BUILD, start):
            self.building = start

    def begin(self, start: Start) -> bool:
        """Lets it become a trial, that which it has built if it has built one; whether it still could be told."""
        other = self.building is not None and self.building.arguments != start.arguments
        if other or not self._tell(BEGIN, start):
            self.end()
            return False
        self.line.close()
        return True

    def end(self) -> None:
        """Kills it."""
        self.line.close()
        send_signal(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def _tell(self, what: str, start: Start) -> bool:
        try:
            self.line.sendall(json.dumps({what: dataclasses.asdict(start)}).encode() + b"\n")
        except OSError:
            return False
        return True


class Waiting:
    """The process that waits; what it writes goes to a file of its own until it begins."""

    def __init__(self, line: socket.socket) -> None:
        self._orders = line.makefile("rb")
        line.close()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - until it begins
        self._begun: Start | None = None
        _write_to(self._said.fileno())

    def told_to_build(self) -> Start | None:
        """The trial that it is to build; None where it has begun instead."""
        kind, start = self._next()
        if kind == BUILD:
            return start
        self._begin(start)
        return None

    def begun(self) -> Start:
        """What it is to become, its log and processors taken; waits until that is told."""
        if self._begun is None:
            self._begin(self._next()[1])
        assert self._begun is not None
        return self._begun

    def _next(self) -> tuple[str, Start]:
        """The next order; ends the process where there will be none."""
        flush()
        line = self._orders.readline()
        if not line:
            os._exit(0)
        ((kind, start),) = json.loads(line).items()
        return kind, Start(**start)

    def _begin(self, start: Start) -> None:
        self._begun = start
        self._orders.close()
        use_cpus(start.cpus)
        self._said.seek(0)
        open_log(start.log, self._said.read())
        self._said.close()


def open_log(path: str, said: bytes = b"") -> None:
    """Writes what this process says to a file from now on, behind what is there and what it has `said` before."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(log, said)
    _write_to(log)
    os.close(log)


def use_cpus(cpus: Sequence[int]) -> None:
    """Keeps all threads of this process, and those that they start, to these processors; none: changes nothing."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cpus)


def flush() -> None:
    """Writes out what Python still holds back of this process's output."""
    sys.stdout.flush()
    sys.stderr.flush()


def send_signal(pid: int, number: int) -> None:
    """Signals a process that leads a session; SIGKILL goes to all that it started too. Nothing where it has ended."""
    if number == signal.SIGKILL:
        send_to_group(pid, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _write_to(file: int) -> None:
    for target in (1, 2):
        os.dup2(file, target)
