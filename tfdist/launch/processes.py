"""One worker as a process: started, watched, signalled, and ended with all its own children.

Invariant: a worker leads a process group of its own, and when it is reaped nothing of that group is left.

Used by `local_workers.py` and, on another node, `worker_host.py`; `watch.py` sees only the `Worker` protocol.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, TypeVar

CHILD = Path(__file__).with_name("child.py")
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
EXIT_KILLED = 137  # 128 + SIGKILL
OUT_OF_MEMORY = "out of memory"
KILLED_FOR_MEMORY = f"the kernel killed a process here for want of memory: {OUT_OF_MEMORY}"
# cgroups(7), version 2: this container's own count. Else proc(5): the machine's, since Linux 4.13.
_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
_Device = TypeVar("_Device")


class Worker(Protocol):
    """The interface of a worker to its supervision, whoever started it."""

    index: int
    pid: int | None
    """The id of the process itself; None before it is started."""
    heartbeat: Path
    """Where it shows itself, see `tfdist.telemetry.heartbeat`."""

    @property
    def state(self) -> str:
        """The letter of proc(5) for the process; empty where there is none."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def poll(self) -> int | None:
        """The exit status as a shell would give it (128 + N for signal N); None while it runs."""

    def send(self, signal_number: int) -> None:
        """Signals the worker; SIGKILL goes to its whole process group. Does nothing when it has ended."""


class Process(Worker):
    """A worker that is a child of this process."""

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        cpus: Sequence[int] = (),
        heartbeat: Path = Path(os.devnull),
    ) -> None:
        self.index = index
        self.heartbeat = heartbeat
        self._status: int | None = None
        self._polling = threading.Lock()  # several threads ask on Ray, and one of them reaps
        self._popen = subprocess.Popen(  # by a child that does not outlive this process
            [sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), ",".join(map(str, cpus)), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """The pipes of its stdout and stderr."""
        assert self._popen.stdout is not None and self._popen.stderr is not None
        return self._popen.stdout, self._popen.stderr

    def poll(self) -> int | None:
        with self._polling:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if self._status is None and os.waitid(os.P_PID, self._popen.pid, options) is not None:
                send_to_group(self._popen.pid, signal.SIGKILL)  # before it is reaped its number cannot be another's
                self._status = shell_status(self._popen.wait())
            return self._status

    def send(self, signal_number: int) -> None:
        if self.poll() is not None:
            return
        if signal_number == signal.SIGKILL:
            send_to_group(self._popen.pid, signal_number)
        else:
            self._popen.send_signal(signal_number)

    def wait(self) -> int:
        """Waits for its end and returns the status."""
        while (status := self.poll()) is None:
            os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        return status


def send_to_group(pid: int, signal_number: int) -> None:
    """Signals a process group; does nothing where it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal_number)


def shell_status(returncode: int) -> int:
    """The status as a shell gives it: 128 + N where Python's is -N."""
    return 128 - returncode if returncode < 0 else returncode


def count_memory_kills() -> int:
    """How often this container, or the machine, killed a process for want of memory since it was started."""
    for path in _COUNTERS:
        with contextlib.suppress(OSError):
            counts = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def explain_kill(status: int, kills_before: int) -> str:
    """A line on the end of a process where the kernel killed it for want of memory; else empty."""
    return f"{KILLED_FOR_MEMORY}\n" if status == EXIT_KILLED and count_memory_kills() > kills_before else ""


def deal(devices: Sequence[_Device], count: int) -> list[list[_Device]]:
    """Deals devices to `count` processes in equal parts; one is shared only if there are too few."""
    if count > len(devices):
        return [[devices[index % len(devices)]] for index in range(count)]
    size = len(devices) // count
    return [list(devices[index * size : (index + 1) * size]) for index in range(count)]


def cpu_shares(num_workers: int) -> list[list[int]]:
    """The CPUs of this process, dealt to the workers in equal parts; a CPU is shared only if there are too few."""
    return deal(sorted(os.sched_getaffinity(0)), num_workers)
