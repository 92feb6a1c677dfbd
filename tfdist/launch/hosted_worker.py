"""A worker on another node as the supervision sees it: a `WorkerHost` there shows it, and what it shows is kept here.

Invariant: what the process wrote is passed on before its end is told; a host that is lost ends the worker.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Protocol

from tfdist.launch.processes import Worker
from tfdist.launch.supervise.output import STDERR, STDOUT, Output
from tfdist.launch.worker_host import Seen
from tfdist.telemetry import heartbeat

LOOK_SECONDS = 0.25
_LOST = 128 + signal.SIGKILL


class HostLostError(Exception):
    """The worker's host does not answer any more; the text says why."""


class Host(Protocol):
    """A `WorkerHost`, wherever it is."""

    def look(self, seconds: float) -> Seen:
        """As `WorkerHost.look`; raises HostLostError."""

    def send(self, signal_number: int) -> None:
        """As `WorkerHost.send`; does nothing where the host is lost."""


class HostedWorker(Worker):
    """A worker as its host shows it; before it has one it only runs, and any signal ends it."""

    def __init__(self, index: int, directory: Path, output: Output) -> None:
        self.index = index
        self.heartbeat = directory / f"{index}.heartbeat"
        self._output = output
        self._pid: int | None = None
        self._state = ""
        self._status: int | None = None
        self._host: Host | None = None
        self._lock = threading.Lock()
        self._follower: threading.Thread | None = None
        pipes = {stream: os.pipe() for stream in (STDOUT, STDERR)}
        self._writing = {stream: writing for stream, (_, writing) in pipes.items()}
        for stream, (reading, _) in pipes.items():
            output.follow(os.fdopen(reading, "rb", buffering=0), stream, index)

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def state(self) -> str:
        return self._state

    def poll(self) -> int | None:
        return self._status

    def send(self, signal_number: int) -> None:
        with self._lock:
            if self._host is None:
                if self._status is None and signal_number in (signal.SIGTERM, signal.SIGKILL):
                    self._end(128 + signal_number)
            elif self._status is None:
                self._host.send(signal_number)

    def begin(self, host: Host) -> bool:
        """Whether the host may start the process: nobody has ended it before."""
        with self._lock:
            if self._status is None:
                self._host = host
            return self._status is None

    def follow(self) -> None:
        """Takes what the host shows, on a thread of its own, until the process ends, or the host is lost."""
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def join(self) -> None:
        """Waits until nothing of what the host shows is taken any more."""
        if self._follower is not None:
            self._follower.join()

    def _follow(self) -> None:
        assert self._host is not None
        try:
            while self._status is None:
                self._take(self._host.look(LOOK_SECONDS))
        except HostLostError as error:
            self.fail(f"worker {self.index} was lost: {error}")
        finally:
            self._close()

    def fail(self, why: str, status: int = _LOST) -> None:
        """Ends it from here."""
        with self._lock:
            if self._status is None:
                self._output.say(why)
                self._end(status)

    def _take(self, seen: Seen) -> None:
        for stream, data in seen.written:
            _write_all(self._writing[stream], data)
        for ending, content in seen.shown.items():
            if not ending:
                content = heartbeat.shifted(content, time.monotonic() - seen.now)
            part = self.heartbeat.with_name(f"{self.heartbeat.name}.part")
            part.write_bytes(content)
            part.replace(self.heartbeat.with_name(self.heartbeat.name + ending))
        self._pid, self._state = seen.pid, seen.state
        if seen.status is not None:
            with self._lock:
                if self._status is None:
                    self._end(seen.status)

    def _end(self, status: int) -> None:
        if self._follower in (None, threading.current_thread()):  # another may be writing, and closes when it is done
            self._close()
        self._status = status

    def _close(self) -> None:
        for writing in self._writing.values():
            os.close(writing)
        self._writing.clear()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
