"""Sweeps as processes, by tfdist's command and by KerasTuner, and what they wrote. Used by tuning.py."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measuring import HERE

MOST_SECONDS = 300.0  # of one sweep
Event = dict[str, Any]


class Sweep:
    """A sweep of one or more processes, the first of which is its chief.

    Attributes:
      directory: where its files are until it is closed.
      started: when the processes were started, in seconds since 1970.
      ended: when the chief had ended.
    """

    def __init__(self, directory: Path, log: Path) -> None:
        self.directory = directory
        self._log = log
        self._known: list[Event] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self.started = self.ended = time.time()

    def start(self, command: Sequence[str], **variables: str) -> None:
        """Starts one of its processes."""
        paths = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        local = {"TF_CPP_MIN_LOG_LEVEL": "3", "no_proxy": "127.0.0.1,localhost", "CUDA_VISIBLE_DEVICES": ""}
        environment = {**os.environ, **local, "PYTHONPATH": paths, **variables}
        with open(self.directory / "output", "a") as output:
            self._processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )

    @property
    def events(self) -> list[Event]:
        """What it has written so far; each has `at`, in seconds since 1970."""
        if self._known is not None:
            return self._known
        lines = self._log.read_text().split("\n")[:-1] if self._log.exists() else []
        events = [json.loads(line) for line in lines]
        return [{**event, "at": _seconds(event["time"])} for event in events]

    def of(self, kind: str) -> list[Event]:
        """The events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    def wait(self) -> None:
        """Until the chief has ended, well; ends the benchmark otherwise."""
        status = self._processes[0].wait(MOST_SECONDS)
        self.ended = time.time()
        if status:
            sys.exit(f"a sweep ended with status {status}:\n{(self.directory / 'output').read_text()[-3000:]}")

    def close(self) -> None:
        """Ends what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._known = self.events


@contextlib.contextmanager
def tfdist_sweep(*parameters: str) -> Iterator[Sweep]:
    """A sweep by the command, of tuning.gin with these parameters."""
    with _directory() as directory:
        sweep = Sweep(directory, directory / "sweep" / "sweep.jsonl")
        given = [f"--gin_param={parameter}" for parameter in parameters]
        command = [sys.executable, "-m", "tfdist.main", f"--gin_file={HERE / 'tuning.gin'}", *given, "--mode=tune"]
        with contextlib.closing(sweep):
            sweep.start([*command, f"--run_dir={directory / 'sweep'}"])
            yield sweep


@contextlib.contextmanager
def keras_sweep(
    search: str, max_epochs: int, seed: int, *, seconds: float = 0.0, num_workers: int = 0, max_trials: int = 1
) -> Iterator[Sweep]:
    """A sweep by tuning_peer.py: in one process, or with workers by a chief and so many."""
    with _directory() as directory:
        sweep = Sweep(directory, directory / "log")
        arguments = [str(directory / "log"), search, str(max_epochs), str(seed), str(seconds), str(max_trials)]
        command = [sys.executable, str(HERE / "tuning_peer.py"), *arguments]
        cluster = {"KERASTUNER_ORACLE_IP": "127.0.0.1", "KERASTUNER_ORACLE_PORT": str(_free_port())}
        members = ["chief", *(f"worker{index}" for index in range(num_workers))] if num_workers else []
        with contextlib.closing(sweep):
            if not members:
                sweep.start(command, TUNING_DIRECTORY=str(directory))
            for name in members:
                sweep.start(command, TUNING_DIRECTORY=str(directory), KERASTUNER_TUNER_ID=name, **cluster)
            yield sweep


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-", ignore_cleanup_errors=True) as scratch:
        yield Path(scratch)


def _seconds(moment: float | str) -> float:
    return moment if isinstance(moment, float) else datetime.datetime.fromisoformat(moment).timestamp()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
