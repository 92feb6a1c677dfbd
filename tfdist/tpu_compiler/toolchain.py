"""libtpu's compiler, which needs no TPU, in an environment of its own.

Invariant: nothing of JAX comes into this process. The environment is made once for a user and a Python, in the user's
cache, and used only when it is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, UserError
from tfdist.strategies.cluster import environment

PACKAGES = ("jax==0.10.2", "jaxlib==0.10.2", "libtpu==0.0.42.1")  # tried with TensorFlow 2.21
SCRIPT = Path(__file__).with_name("compile_program.py")
NAME = "tpu-compiler"
WHOLE = ".whole"
# There is no metadata server to ask which TPU this machine has, and no TPU that one process alone may have.
VARIABLES = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}


class Compiler:
    """The compiler's process; made by `open_compiler`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def compile(self, path: str, *, num_replicas: int, topology: str) -> dict[str, Any]:
        """Compiles a program for a topology such as "v5e:2x2"; the answer's `error` says why it is refused."""
        job = {"path": path, "num_replicas": num_replicas, "topology": topology}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise TfdistError(f"The TPU compiler's process ended with status {self._process.wait()}.")
        return json.loads(answer)


@contextlib.contextmanager
def open_compiler(notify: Callable[[str], None]) -> Iterator[Compiler]:
    """Starts the compiler, in an environment that is made where there is none yet.

    Raises:
      UserError: the environment cannot be made.
    """
    python = make_environment(PACKAGES, name=NAME, notify=notify)
    command = [str(python), "-I", str(SCRIPT)]
    with subprocess.Popen(
        command,
        env={**environment.current(), **VARIABLES},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield Compiler(process)
        finally:
            process.kill()


def is_installed() -> bool:
    """Whether there is such an environment."""
    return (_find_directory(PACKAGES, NAME) / WHOLE).exists()


def make_environment(packages: Sequence[str], *, name: str, notify: Callable[[str], None]) -> Path:
    """The Python of an environment that has these packages alone, which is made where there is none yet.

    Raises:
      UserError: it cannot be made.
    """
    directory = _find_directory(packages, name)
    python = directory / "bin" / "python"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / WHOLE).exists():
            notify(f"Installing {', '.join(packages)} into {directory} (once)")
            _run(name, [sys.executable, "-m", "venv", "--clear", str(directory)])
            _run(name, [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
            (directory / WHOLE).touch()
    return python


def _find_directory(packages: Sequence[str], name: str) -> Path:
    words = [name, f"cp{sys.version_info.major}{sys.version_info.minor}", *packages]
    return Path(environment.cache_directory()) / "-".join(words).replace("==", "")


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise UserError(f"The environment {name} cannot be made: {' '.join(command[:6])} … says: {last}")
