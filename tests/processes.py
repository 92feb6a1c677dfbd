"""Processes that a test watches, signals and ends; nothing that one of them starts outlives it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import forks
import support

LEFT_SECONDS = 30.0  # for processes to be gone that lost the one that started them


class Running:
    """A process in a session of its own, whose output goes to a file. A context manager, which kills what is left.

    Args:
      command: with its arguments.
      log: the output is added to this file.
      variables: set on top of those of `support.clean_environment`; None takes one out.
      directory: it works in.
      how: more arguments of `subprocess.Popen`.
    """

    is_forked = True  # where tests/forks.py can; else it is started
    poll_seconds = 0.01

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        log: Path,
        variables: Mapping[str, str | None] = {},
        directory: Path | None = None,
        **how: Any,
    ) -> None:
        self.mark = uuid.uuid4().hex
        environment = support.clean_environment() | dict(variables) | {support.MARK: self.mark}
        self._log = log
        with log.open("ab") as file:
            self._begin = file.tell()
            ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            self.popen = (forks.Popen if self.is_forked else subprocess.Popen)(
                [os.fspath(part) for part in command],
                env={name: value for name, value in environment.items() if value is not None},
                cwd=directory,
                start_new_session=True,
                **ends | how,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        support.kill_marked(self.mark)
        self.popen.wait()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self.popen.poll()

    @property
    def output(self) -> str:
        """What it wrote so far."""
        return self._log.read_bytes()[self._begin :].decode(errors="replace")

    def signal(self, number: int) -> None:
        """Signals the process itself; not what it started."""
        self.popen.send_signal(number)

    def until(self, holds: Callable[[], Any], *, timeout: float = 480.0) -> Any:
        """Waits for something to hold, as long as the process runs; returns what `holds` gave."""
        deadline = time.monotonic() + timeout
        while True:
            status = self.status
            if found := holds():
                return found
            assert status is None, f"ended with {status}\n{self.output}"
            assert time.monotonic() < deadline, f"not within {timeout} s\n{self.output}"
            time.sleep(self.poll_seconds)

    def end(self, *, timeout: float = 480.0) -> int:
        """Waits for its end; the exit status, negative for a signal."""
        return self.popen.wait(timeout)

    def kill(self) -> None:
        """Kills the process itself, and waits until nothing that it started is left."""
        self.signal(signal.SIGKILL)
        self.end()
        self.wait_until_all_gone()

    def wait_until_all_gone(self, *, timeout: float = LEFT_SECONDS) -> None:
        """Waits until nothing that it started is left."""
        deadline = time.monotonic() + timeout
        while left := support.find_marked(self.mark):
            if time.monotonic() > deadline:
                raise TimeoutError(f"left behind: {left}")
            time.sleep(0.01)


class InTerminal(Running):
    """A process in a terminal of its own; the output is what it writes there."""

    def __init__(self, *given: Any, columns: int = 120, **more: Any) -> None:
        other_end, own_end = pty.openpty()
        self.terminal = io.FileIO(other_end, "r+")
        termios.tcsetwinsize(own_end, (24, columns))
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), own_end)
        super().__init__(*given, **ends | {"preexec_fn": _take_terminal} | more)
        os.close(own_end)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # Either is the terminal's end, from the one side or the other.
        with contextlib.suppress(OSError, ValueError), self._log.open("ab", buffering=0) as log:
            while text := self.terminal.read(4096):
                log.write(text)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.terminal.close()

    def end(self, *, timeout: float = 480.0) -> int:
        status = super().end(timeout=timeout)
        self._reader.join(5)
        return status


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def as_in_shell(status: int) -> int:
    return status if status >= 0 else 128 - status


def running(
    arguments: Sequence[str | os.PathLike[str]],
    log: Path,
    variables: Mapping[str, str] = {},
    directory: Path | None = None,
    module: str = "tfdist.main",
) -> Running:
    """A process of `python -m MODULE`."""
    return Running([sys.executable, "-m", module, *arguments], log, variables, directory)


@contextlib.contextmanager
def running_workers(
    commands: Sequence[Sequence[str | os.PathLike[str]]],
    logs: Path,
    variables: Mapping[str, str] = {},
    directory: Path | None = None,
    **how: Any,
) -> Iterator[list[Running]]:
    """A process of each command, as the workers of a cluster on this machine; `logs` is a directory."""
    addresses = [f"127.0.0.1:{port}" for port in support.free_ports(len(commands))]
    with contextlib.ExitStack() as stack:
        workers = []
        for index, command in enumerate(commands):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            given = dict(variables) | {"TF_CONFIG": json.dumps(config)}
            workers.append(stack.enter_context(Running(command, logs / f"worker-{index}.log", given, directory, **how)))
        yield workers


@contextlib.contextmanager
def serving(
    command: Sequence[str | os.PathLike[str]], log: Path, is_up: Callable[[], bool], **how: Any
) -> Iterator[Running]:
    """A server, once `is_up` says that it answers."""
    with Running(command, log, **how) as server:
        server.until(is_up, timeout=support.PATIENCE * 60)
        yield server
