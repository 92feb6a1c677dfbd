"""One worker of a run on its node: a host that starts the process, shows it, and signals it.

Invariant: the process does not outlive the host, which does not outlive the launcher that made it. What the process
writes is handed out once, in its order; its end is told when all of that was.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError
from tfdist.launch import local_workers
from tfdist.launch.plan import worker_environment
from tfdist.launch.processes import Process, count_memory_kills, explain_kill
from tfdist.launch.supervise.output import DRAIN_SECONDS, STDERR, STDOUT, read_pipe
from tfdist.telemetry import heartbeat


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
