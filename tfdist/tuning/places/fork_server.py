"""Starts trials in no time: a process that has TensorFlow imported already becomes each of them by a fork.

Invariant: the process that forks has one job and no thread of Python's besides, has imported nothing of the user's,
and has not used TensorFlow; each trial imports the rest and sets up its devices itself. A process may be prepared while
another trains: it imports what it will need, builds its trial if that is known already and memory is not short, and
waits to be told to begin. No trial outlives the fork server, which does not outlive the chief, however that ends.
Linux and other systems with `fork` only.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from tfdist.errors import EXIT_BUG, TfdistError
from tfdist.launch.processes import has_ended, shell_status
from tfdist.storage.memory import available_bytes
from tfdist.strategies.cluster import environment
from tfdist.tuning.places import group
from tfdist.tuning.places.forks import die_with, forked
from tfdist.tuning.places.standby import Standby, Start, Waiting, flush, open_log, send_signal, use_cpus

Run = Callable[[Sequence[str], Callable[[], object]], int]
MEMORY_FACTOR = 1.5  # so many times what the largest trial took has to be free for one more to be built


class ForkServer:
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

    def build(self, start: Start) -> None:
        """Has a prepared process continue to the first step of what will be started next, if memory is not short.

        Only one is built: what was built before, and not started, is ended.
        """
        self._send({"build": dataclasses.asdict(start)})

    def signal(self, name: str, number: int) -> None:
        """Signals a process; SIGKILL goes to all that it started too. Does nothing when it has ended."""
        self._send({"signal": number, "name": name})

    def ended(self) -> Iterator[tuple[str, int]]:
        """Name and exit status (128 + N for signal N) of the processes that ended since; does not wait.

        Raises:
          TfdistError: the fork server itself is gone.
        """
        while select.select([self._connection], [], [], 0)[0]:
            data = self._connection.recv(1 << 16)
            if not data:
                raise TfdistError(
                    "The process that starts the trials was killed. What the trials saved is kept: the same command "
                    "resumes from there."
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


def open_fork_server(run: Run, prepare: Callable[[Sequence[str]], None]) -> ForkServer:
    """Forks the fork server from this process.

    Args:
      run: becomes a trial: takes the command's arguments, and what to call before the first step: it returns when the
        trial has begun. Returns the exit status.
      prepare: imports what `run` will need for such arguments, and changes nothing else.
    """
    ours, theirs = socket.socketpair()
    flush()
    chief = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return ForkServer(ours, pid)
    ours.close()
    serve(theirs, chief, run, prepare)


def start_fork_server(program: str) -> ForkServer:
    """Starts the fork server as a Python of its own, where a fork of this process could not use TensorFlow.

    Args:
      program: Python that calls `serve` with the socket whose descriptor is `sys.argv[1]` and the chief `sys.argv[2]`.
    """
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    begin = f"import json, sys; sys.path[:] = json.loads(sys.argv[3]); {program}"
    given = [str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", begin, *given], environment.current())
    theirs.close()
    return ForkServer(ours, pid)


def serve(connection: socket.socket, chief: int, run: Run, prepare: Callable[[Sequence[str]], None]) -> NoReturn:
    """Is the fork server until the chief, the process that started this one, hangs up or ends; ends the process."""
    with forked():
        die_with(chief)
        os.setsid()  # Ctrl-C is the chief's to deal with
        gc.freeze()  # what the trials share with us stays shared
        _Server(connection, run, prepare).serve()
    os._exit(0)


class _Server:
    """The fork server itself."""

    def __init__(self, connection: socket.socket, run: Run, prepare: Callable[[Sequence[str]], None]) -> None:
        self._connection = connection
        self._run = run
        self._prepare = prepare
        self._names: dict[int, str] = {}
        self._standbys: dict[str, Standby] = {}  # by the place that they were prepared for
        self._peak_bytes = 0  # of the largest trial that has ended
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
        if "build" in message:
            self._build(Start(**message["build"]))
            return
        for pid, name in self._names.items():
            if name == message["name"]:
                send_signal(pid, message["signal"])

    def _make_ready(self, start: Start) -> None:
        if start.place in self._standbys:  # it has built something, which is not to be lost
            return
        fork_server = os.getpid()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            self._standbys[start.place] = Standby(pid, ours)
            return
        with forked():
            ours.close()
            self._leave_fork_server(start, fork_server)
            self._wait_for_trial(start, Waiting(theirs))
        os._exit(EXIT_BUG)

    def _wait_for_trial(self, start: Start, waiting: Waiting) -> NoReturn:
        with contextlib.suppress(Exception, SystemExit):  # it will come again, when somebody listens
            self._prepare(start.arguments)
        built = waiting.told_to_build()
        if built is None:
            self._become(waiting.begun())
        status = self._run(built.arguments, waiting.begun)
        waiting.begun()  # it may have ended before its first step; what it said is for the trial's log
        flush()
        os._exit(status)

    def _build(self, start: Start) -> None:
        for place, standby in [*self._standbys.items()]:
            if standby.building is not None:
                self._standbys.pop(place).end()
        idle = next(iter(self._standbys.values()), None)
        if idle is not None and self._has_memory():
            idle.build(start)

    def _has_memory(self) -> bool:
        """Whether one more trial finds room; False before one has ended, as it is not known what they take."""
        with contextlib.suppress(OSError):
            return 0 < MEMORY_FACTOR * self._peak_bytes < available_bytes()
        return False

    def _start(self, start: Start) -> None:
        fork_server = os.getpid()
        standby = self._standby_for(start)
        if standby is not None and standby.begin(start):
            self._names[standby.pid] = start.name
            return
        pid = os.fork()
        if pid:
            self._names[pid] = start.name
            return
        with forked():
            self._leave_fork_server(start, fork_server)
            open_log(start.log)
            self._become(start)
        os._exit(EXIT_BUG)

    def _standby_for(self, start: Start) -> Standby | None:
        """That which has built the trial, or else the one of its place, if it has built no other."""
        standbys = self._standbys
        built = [
            place for place, standby in standbys.items() if standby.building and standby.building.name == start.name
        ]
        if built:
            standby = standbys.pop(built[0])
            if start.place in standbys:  # the place from which it comes gets the other one
                standbys[built[0]] = standbys.pop(start.place)
            return standby
        is_free = start.place in standbys and standbys[start.place].building is None
        return standbys.pop(start.place) if is_free else None

    def _leave_fork_server(self, start: Start, fork_server: int) -> None:
        """Leaves the fork server's files, signals and session behind, and takes the place's processors and devices."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._connection, self._woken, self._wake, *(standby.line for standby in self._standbys.values())):
            each.close()
        die_with(fork_server)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        use_cpus(start.cpus)
        environment.change(start.environment)

    def _become(self, start: Start) -> NoReturn:
        status = group.run(self._run_now, start) if start.processes > 1 else self._run_now(start.arguments)
        flush()
        os._exit(status)

    def _run_now(self, arguments: Sequence[str]) -> int:
        return self._run(arguments, lambda: None)

    def _reap(self) -> None:
        for place, standby in [*self._standbys.items()]:
            if has_ended(standby.pid):
                self._standbys.pop(place).end()
        for pid in [pid for pid in self._names if has_ended(pid)]:
            send_signal(pid, signal.SIGKILL)  # what it left behind; before it is reaped its number is its own
            _, status, used = os.wait4(pid, 0)
            self._peak_bytes = max(self._peak_bytes, used.ru_maxrss * 1024)
            line = {"name": self._names.pop(pid), "status": shell_status(os.waitstatus_to_exitcode(status))}
            self._connection.sendall(json.dumps(line).encode() + b"\n")

    def _kill_all(self) -> None:
        for pid in self._names:
            send_signal(pid, signal.SIGKILL)
        for pid in self._names:
            os.waitpid(pid, 0)
        for standby in self._standbys.values():
            standby.end()
