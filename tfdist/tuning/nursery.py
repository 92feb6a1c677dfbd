"""Starts trials in no time: a process that has TensorFlow imported already becomes each of them by a fork.

Invariant: the process that forks has one job and no thread of Python's besides, has imported nothing of the user's,
and has not used TensorFlow; each trial imports the rest and sets up its devices itself. A process may be prepared while
another trains: it imports what it will need, and waits to be told its trial. No trial outlives the nursery, and the
nursery does not outlive the chief, however that ends. Linux and other systems with `fork` only.

`main.py` starts it, between importing TensorFlow and reading what the configuration names; `chief.py` uses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from tfdist.errors import EXIT_BUG, TfdistError
from tfdist.launch.processes import has_ended
from tfdist.strategies import environment
from tfdist.tuning import group
from tfdist.tuning.forks import die_with, forked


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
    """

    name: str
    arguments: Sequence[str]
    log: str
    environment: Mapping[str, str | None]
    cpus: Sequence[int] = ()
    place: str = ""
    processes: int = 1
    launcher: str = ""


class Nursery:
    """The chief's end of it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._pid = pid
        self._rest = b""

    def fileno(self) -> int:
        """Becomes readable when a process has ended."""
        return self._connection.fileno()

    def start(self, start: Start) -> None:
        """Starts a process."""
        self._send({"start": dataclasses.asdict(start)})

    def prepare(self, start: Start) -> None:
        """Makes a process ready for a start like this one at the same place; its name, arguments and log may differ."""
        self._send({"prepare": dataclasses.asdict(start)})

    def signal(self, name: str, number: int) -> None:
        """Signals a process; SIGKILL goes to all that it started too. Does nothing when it has ended."""
        self._send({"signal": number, "name": name})

    def ended(self) -> Iterator[tuple[str, int]]:
        """Name and exit status (128 + N for signal N) of the processes that ended since; does not wait.

        Raises:
          TfdistError: the nursery itself is gone.
        """
        while select.select([self._connection], [], [], 0)[0]:
            data = self._connection.recv(1 << 16)
            if not data:
                raise TfdistError(
                    "The process that starts the trials was killed. What the trials saved is kept: the same command "
                    "goes on from there."
                )
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                yield message["name"], message["status"]

    def close(self) -> None:
        """Ends it and all that it started."""
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `ended` says so
            self._connection.sendall(json.dumps(message).encode() + b"\n")


def open_nursery(run: Callable[[Sequence[str]], int], prepare: Callable[[Sequence[str]], None]) -> Nursery:
    """Forks the nursery from this process.

    Args:
      run: becomes a trial: takes the command's arguments and returns the exit status.
      prepare: imports what `run` will need for such arguments, and changes nothing else.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    chief = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Nursery(ours, pid)
    ours.close()
    with forked():
        die_with(chief)
        os.setsid()  # Ctrl-C is the chief's to deal with
        gc.freeze()  # what the trials share with us stays shared
        _Server(theirs, run, prepare).serve()
    os._exit(0)


class _Server:
    """The nursery itself."""

    def __init__(
        self,
        connection: socket.socket,
        run: Callable[[Sequence[str]], int],
        prepare: Callable[[Sequence[str]], None],
    ) -> None:
        self._connection = connection
        self._run = run
        self._prepare = prepare
        self._names: dict[int, str] = {}
        self._spares: dict[str, _Spare] = {}
        self._woken, self._wake = socket.socketpair()
        for each in (self._woken, self._wake):
            each.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the chief hangs up."""
        rest = b""
        while True:
            ready = select.select([self._connection, self._woken], [], [])[0]
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(1 << 12)
                self._reap()
            if self._connection in ready:
                data = self._connection.recv(1 << 16)
                if not data:
                    return self._kill_all()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def _obey(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._start(Start(**message["start"]))
            return
        if "prepare" in message:
            self._make_ready(Start(**message["prepare"]))
            return
        for pid, name in self._names.items():
            if name == message["name"]:
                _send_signal(pid, message["signal"])

    def _make_ready(self, start: Start) -> None:
        nursery = os.getpid()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            self._spares[start.place] = _Spare(pid, ours)
            return
        with forked():
            ours.close()
            self._wait_for_trial(start, nursery, theirs)
        os._exit(EXIT_BUG)

    def _wait_for_trial(self, start: Start, nursery: int, told: socket.socket) -> NoReturn:
        self._leave_nursery(start, nursery)
        with tempfile.TemporaryFile() as said:
            _write_to(said.fileno())
            with contextlib.suppress(Exception, SystemExit):  # it will come again, when somebody listens
                self._prepare(start.arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            line = told.makefile("rb").readline()
            if not line:
                os._exit(0)
            told.close()
            said.seek(0)
            self._become(Start(**json.loads(line)), said.read())

    def _start(self, start: Start) -> None:
        nursery = os.getpid()
        spare = self._spares.pop(start.place, None)
        if spare is not None and spare.tell(start):
            self._names[spare.pid] = start.name
            return
        pid = os.fork()
        if pid:
            self._names[pid] = start.name
            return
        with forked():
            self._leave_nursery(start, nursery)
            self._become(start)
        os._exit(EXIT_BUG)

    def _leave_nursery(self, start: Start, nursery: int) -> None:
        """Leaves the nursery's files, signals and session behind, and takes the place's processors and devices."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._connection, self._woken, self._wake, *(spare.line for spare in self._spares.values())):
            each.close()
        die_with(nursery)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if start.cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, start.cpus)
        environment.change(start.environment)

    def _become(self, start: Start, said: bytes = b"") -> NoReturn:
        log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(log, said)
        _write_to(log)
        if start.processes > 1:
            status = group.run(self._run, start.arguments, count=start.processes, launcher=start.launcher)
        else:
            status = self._run(start.arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _reap(self) -> None:
        for place, spare in [*self._spares.items()]:
            if has_ended(spare.pid):
                self._spares.pop(place).end()
        for pid in [pid for pid in self._names if has_ended(pid)]:
            _send_signal(pid, signal.SIGKILL)  # what it left behind; before it is reaped its number is its own
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            line = {"name": self._names.pop(pid), "status": 128 - code if code < 0 else code}
            self._connection.sendall(json.dumps(line).encode() + b"\n")

    def _kill_all(self) -> None:
        for pid in self._names:
            _send_signal(pid, signal.SIGKILL)
        for pid in self._names:
            os.waitpid(pid, 0)
        for spare in self._spares.values():
            spare.end()


@dataclasses.dataclass(frozen=True)
class _Spare:
    """A process that is ready, or about to be, and waits on the other end of `line`."""

    pid: int
    line: socket.socket

    def tell(self, start: Start) -> bool:
        """Lets it become the trial; whether it still could be told."""
        try:
            self.line.sendall(json.dumps(dataclasses.asdict(start)).encode() + b"\n")
        except OSError:
            self.end()
            return False
        self.line.close()
        return True

    def end(self) -> None:
        self.line.close()
        _send_signal(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _write_to(file: int) -> None:
    for target in (1, 2):
        os.dup2(file, target)


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(pid, number)
        os.kill(pid, number)
