"""A worker on another node: the host that runs it there, and the worker as the supervision sees it here.

Invariant: the process does not outlive the host, which does not outlive the launcher that made it. What the process
writes is passed on once, in its order, before its end is told; a host that is lost ends the worker. `hosts.py` and
`ray_workers.py` find the hosts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tfdist.errors import EXIT_BUG, TfdistError
from tfdist.launch import local_workers
from tfdist.launch.plan import Plan, worker_environment
from tfdist.launch.processes import Process, Worker, count_memory_kills, explain_kill
from tfdist.launch.supervise.output import DRAIN_SECONDS, STDERR, STDOUT, Output, read_pipe
from tfdist.telemetry import heartbeat

LOOK_SECONDS = 0.25
_LOST = 128 + signal.SIGKILL


class WorkerHost:
    """A Ray actor, or what this module does as a program of `hosts.py`. Methods are called from several threads.

    Args:
      directory: where the launcher was started; the process starts there if the node has it. None: where Ray starts it.
    """

    def __init__(self, directory: str | None) -> None:
        if directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(directory)
        self._files = tempfile.TemporaryDirectory(prefix="tfdist-worker-")
        self._heartbeat = Path(self._files.name) / "heartbeat"
        self._news = threading.Condition()
        self._written: list[tuple[int, str]] = []
        self._readers: list[threading.Thread] = []
        self._process: Process | None = None
        self._port: socket.socket | None = None

    def meet(self, address: str) -> str:
        """A free address of this node, kept for the process; `address` is the node's own."""
        self._port = local_workers.reserve_port()
        return f"{address}:{self._port.getsockname()[1]}"

    def start(self, index: int, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        """Starts the process: this node's Python with these arguments."""
        environment = worker_environment(os.environ) | dict(variables) | {heartbeat.VARIABLE: str(self._heartbeat)}
        self._memory_kills = count_memory_kills()
        self._process = Process(index, [sys.executable, *arguments], environment, heartbeat=self._heartbeat)
        for pipe, stream in zip(self._process.pipes, (STDOUT, STDERR), strict=True):
            self._readers.append(read_pipe(pipe, functools.partial(self._record_output, stream)))

    def look(self, seconds: float) -> dict[str, Any]:
        """What the process shows at this moment; waits so long for something new.

        Returns:
          Of JSON's kinds, with bytes as texts in Latin-1:
          status: as a shell gives it; None while it runs.
          state: the letter of proc(5); and the `pid`.
          written: what it wrote since, each with its stream.
          shown: the contents of its heartbeat's files by the ends of their names.
          now: `time.monotonic` of this node.
        """
        assert self._process is not None
        with self._news:
            if not self._written and self._process.poll() is None:
                self._news.wait(seconds)
        status = self._process.poll()
        if status is not None:
            for reader in self._readers:
                reader.join(DRAIN_SECONDS)
            self._record_output(STDERR, explain_kill(status, self._memory_kills).encode())
        with self._news:
            written, self._written = self._written, []
        shown = {}
        for path in self._heartbeat.parent.iterdir():
            if not path.name.endswith(".part"):
                shown[path.name.removeprefix(self._heartbeat.name)] = path.read_text("latin-1")
        process = {"status": status, "pid": self._process.pid, "state": self._process.state}
        return process | {"written": written, "shown": shown, "now": time.monotonic()}

    def send(self, signal_number: int) -> None:
        """Signals the process."""
        if self._process is not None:
            self._process.send(signal_number)

    def _record_output(self, stream: int, chunk: bytes) -> None:
        with self._news:
            self._written += [(stream, chunk.decode("latin-1"))] if chunk else []
            self._news.notify_all()


class HostLostError(Exception):
    """The worker's host does not answer any more; the text says why."""


class Host(Protocol):
    """A `WorkerHost`, wherever it is; a worker there has the launcher's variables that are `inherited`."""

    inherited: Mapping[str, str]

    def call(self, method: str, *arguments: Any) -> Any:
        """Returns what a method of the `WorkerHost` returns; raises HostLostError."""

    def send(self, signal_number: int) -> None:
        """Signals the worker; does nothing where the host is lost."""


class HostedWorker(Worker):
    """A worker as its host shows it; before it has one it only runs, and any signal ends it."""

    def __init__(self, index: int, directory: Path, output: Output) -> None:
        self.index = index
        self.heartbeat = directory / f"{index}.heartbeat"
        self.pid: int | None = None
        self._output = output
        self._state = ""
        self._status: int | None = None
        self._host: Host | None = None
        self._lock = threading.Lock()
        self._follower: threading.Thread | None = None
        self._feeds = {stream: output.open_feed(stream, index) for stream in (STDOUT, STDERR)}

    @property
    def state(self) -> str:
        return self._state

    def poll(self) -> int | None:
        return self._status

    def send(self, signal_number: int) -> None:
        with self._lock:
            if self._host is None:
                if self._status is None and signal_number in (signal.SIGTERM, signal.SIGKILL):
                    self._status = 128 + signal_number
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
                self._record_update(self._host.call("look", LOOK_SECONDS))
        except HostLostError as error:
            self.fail(f"worker {self.index} was lost: {error}")
        for feed in self._feeds.values():
            feed(b"")

    def fail(self, why: str, status: int = _LOST) -> None:
        """Ends the worker as failed, without its host."""
        with self._lock:
            if self._status is None:
                self._output.report(why)
                self._status = status

    def _record_update(self, seen: Mapping[str, Any]) -> None:
        for stream, data in seen["written"]:
            self._feeds[stream](data.encode("latin-1"))
        for ending, text in seen["shown"].items():
            content = text.encode("latin-1")
            if not ending:
                content = heartbeat.shift_times(content, time.monotonic() - seen["now"])
            part = self.heartbeat.with_name(f"{self.heartbeat.name}.part")
            part.write_bytes(content)
            part.replace(self.heartbeat.with_name(self.heartbeat.name + ending))
        self.pid, self._state = seen["pid"], seen["state"]
        if seen["status"] is not None:
            with self._lock:
                self._status = seen["status"] if self._status is None else self._status


@contextlib.contextmanager
def start_hosted(
    plan: Plan,
    output: Output,
    find_hosts: Callable[[Sequence[HostedWorker]], Sequence[tuple[str, Host]]],
    assign: Callable[[Sequence[str]], list[dict[str, str]]] | None,
    remove_hosts: Callable[[threading.Thread], None],
) -> Iterator[Sequence[HostedWorker]]:
    """The workers of a plan, which are started and followed on threads of their own.

    Args:
      find_hosts: gives the node and the host of each worker; nothing where they are not wanted any more.
      assign: gives the variables of each worker by the nodes; None: they find each other through TF_CONFIG.
      remove_hosts: ends the hosts; gets the thread that starts the workers, which may wait for one.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-launch-") as directory:
        workers = [HostedWorker(plan.first_index + n, Path(directory), output) for n in range(len(plan.slot_numbers))]
        thread = threading.Thread(target=_start, args=(plan, workers, find_hosts, assign), daemon=True)
        thread.start()
        try:
            yield workers
        finally:
            for worker in workers:  # those too that are not there yet
                worker.send(signal.SIGKILL)
            remove_hosts(thread)
            thread.join()
            for worker in workers:
                worker.join()
            output.drain()


def _start(
    plan: Plan,
    workers: Sequence[HostedWorker],
    find_hosts: Callable[[Sequence[HostedWorker]], Sequence[tuple[str, Host]]],
    assign: Callable[[Sequence[str]], list[dict[str, str]]] | None,
) -> None:
    worker = workers[0]
    try:
        hosts = find_hosts(workers)
        if not hosts:
            return
        addresses = []
        for worker, (node, host) in zip(workers, hosts, strict=True):  # noqa: B007
            addresses.append(host.call("meet", node))
        own = [{"TF_CONFIG": local_workers.tf_config(addresses, number)} for number in range(len(addresses))]
        if assign is not None:
            own = assign([node for node, _ in hosts])
        launchers = {name: value for name, value in plan.environment.items() if name.startswith("TFDIST_")}
        for worker, (_, host), variables in zip(workers, hosts, own, strict=True):
            if worker.begin(host):
                variables = launchers | dict(host.inherited) | variables | plan.own_variables(worker.index)
                host.call("start", worker.index, plan.command[1:], variables)
                worker.follow()
    except HostLostError as error:
        worker.fail(f"worker {worker.index} could not be started: {error}")
    except Exception as error:
        for worker in workers:
            worker.fail(f"worker {worker.index} could not be started: {error!r}", EXIT_BUG)
        raise


def main() -> None:
    """Answers lines of JSON until the launcher closes the connection.

    A request is `{"name": METHOD, "arguments": […]}` on stdin. Each but `send` is answered by a line on stdout,
    `{"value": …}`, in the order of the requests. At the end of stdin the launcher is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the launcher says when the worker ends, which would inherit SIG_IGN
    host = WorkerHost(None)
    for line in sys.stdin:
        request = json.loads(line)
        if request["name"] == "send":
            host.send(*request["arguments"])
            continue
        try:
            answer = {"value": getattr(host, request["name"])(*request["arguments"])}
        except (OSError, TfdistError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    host.send(signal.SIGKILL)


if __name__ == "__main__":
    main()
