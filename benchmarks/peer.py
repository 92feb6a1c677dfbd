"""Processes of another framework: how a benchmark asks one for samples, and how one answers.

A process prints "ready" and what it has to tell, then for each whole number on standard input a line with the seconds
that so many steps took. `Peer` is the side that asks; programs in the environment of tools/peers.sh call `serve`.
Imports the standard library alone.
"""

from __future__ import annotations

import collections
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from measuring import NOT_INSTALLED, time_call

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"  # made by tools/peers.sh
PACKAGES = {"peers_grain.py": "grain", "peers_jax.py": "jax", "peers_torch.py": "torch"}  # what each needs

Seconds = Callable[[int], float]


def require_peer(program: str) -> None:
    """Prints which package is missing and exits with NOT_INSTALLED where the peers' environment is not made."""
    if not PYTHON.exists():
        print(f"{PACKAGES[program]} is not installed in {PYTHON.parent.parent}. Run tools/peers.sh.", flush=True)
        sys.exit(NOT_INSTALLED)


class Peer:
    """A program of this directory in the peers' environment; with several workers each has a core of its own.

    Attributes:
      told: what the first process printed after "ready".
    """

    def __init__(self, program: str, *arguments: object, workers: int = 1) -> None:
        require_peer(program)
        command = [str(PYTHON), str(HERE / program), *map(str, arguments)]
        self._name = " ".join(command[1:])
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the processes
        shared = os.environ | {"KERAS_BACKEND": "jax"}
        environments, pins = [shared], [[]]
        if workers > 1:
            with socket.create_server(("localhost", 0)) as taken:
                port = taken.getsockname()[1]
            meeting = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            environments = [shared | meeting | {"RANK": str(rank)} for rank in range(workers)]
            cores = sorted(os.sched_getaffinity(os.getppid()))  # a worker that asks has one of them
            pins = [["taskset", "-c", str(cores[rank])] for rank in range(workers)]
        self._processes = [
            subprocess.Popen(
                [*pin, *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
            for pin, environment in zip(pins, environments, strict=True)
        ]
        self.told = self._answers("ready")[0]

    def __call__(self, steps: int) -> float:
        """The seconds of the slowest process."""
        for process in self._processes:
            assert process.stdin is not None
            print(steps, file=process.stdin, flush=True)
        return max(map(float, self._answers("seconds")))

    def close(self) -> None:
        for process in self._processes:
            process.communicate(timeout=60)

    def _answers(self, begin: str) -> list[str]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith(begin)), None)
            if line is None:
                self._errors.seek(0)
                raise RuntimeError(f"{self._name} ended:\n{self._errors.read()[-4000:]}")
            answers.append(line.removeprefix(begin).strip())
        return answers


def serve(seconds: Seconds, *told: object) -> None:
    """Answers until standard input ends."""
    print("ready", *told, flush=True)
    for line in sys.stdin:
        print("seconds", seconds(int(line)), flush=True)


def time_steps(train: Callable[[int], object]) -> Seconds:
    """A function that trains a number of steps, and gives the seconds that they took."""
    return lambda steps: time_call(train, steps)


def describe_arrays(arrays: Iterable[Any]) -> str:
    """Types and shapes of a batch's arrays."""
    counts = collections.Counter(f"{each.dtype}{list(each.shape)}" for each in arrays)
    return " and ".join(f"{counts[each]} {each}" for each in sorted(counts))
