"""Helpers that tests import: real processes that cannot outlive their test, and free ports.

Every process started here, and whatever it starts, bears a mark of its own in its environment; `run_python` ends
whatever still bears it, in whichever session or process group that is (horovodrun's workers leave their parent's).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fcntl
import functools
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

import forks
import psutil
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TESTS_PATH = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}  # for programs that import the tests' modules
LAUNCH = {  # by strategy
    "multi_worker": ("--workers=2", "--max_restarts=0"),
    "horovod": ("--workers=2", "--launcher=horovod", "--max_restarts=0"),
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
# Tests start up to four processes on what may be two cores. The same number everywhere also means the same order of
# additions inside an operation, without which no two runs would be bit-identical.
THREADS = {"TF_NUM_INTRAOP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "2"}
CLUSTER_VARIABLES = (
    "TF_CONFIG",
    "SLURM_",
    "HOROVOD_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "TPU_",
    "COLAB_TPU_ADDR",
    "KERASTUNER_",
)
MARK = "TFDIST_TEST_PROCESS"
# What a text's hole holds, by its expression or the text before it.
HOLES = {
    "self.NAME": "train",
    "setting": "evaluate.weights",
    "DETERMINISM": "train.deterministic",
    "BACKUP": "keras.callbacks.BackupAndRestore",
    "keras.callbacks.": "Callback",
    "keras.metrics.": "AUC",
    "keras.optimizers.": "Adam",
    **dict.fromkeys(("parts", "steps", "wanted"), "2"),
}


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process that ended."""

    status: int
    stdout: str
    stderr: str

    def check(self) -> Finished:
        """Fails the test, with both outputs, unless the status is 0."""
        if self.status:
            pytest.fail(f"ended with status {self.status}\n{self.outputs()}", pytrace=False)
        return self

    def outputs(self) -> str:
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def clean_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a child: quiet, on CPUs, two threads, part of no cluster, this tree importable."""
    environment = {
        name: value
        for name, value in (os.environ if base is None else base).items()
        if not name.startswith(CLUSTER_VARIABLES)
    }
    # gRPC would send even what is meant for this machine through a proxy.
    for name in ("no_proxy", "NO_PROXY"):
        environment[name] = ",".join(filter(None, [environment.get(name), "127.0.0.1", "localhost"]))
    path = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))
    return environment | QUIET | THREADS | {"PYTHONPATH": path}


@contextlib.contextmanager
def shared_directory(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[pathlib.Path]:
    """A directory that the processes of a parallel run of the tests have in common, held by one of them at a time."""
    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    directory.mkdir(exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


PATIENCE = 4  # times as long as on a quiet machine


def read_changed(file: pathlib.Path, changes: Mapping[str, str]) -> str:
    """The text of a file with changes, each of which must be possible."""
    text = file.read_text()
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def uncomment(text: str) -> str:
    """A manifest with all its options, which stand in comments."""
    return re.sub(r"^( *)#(?=[^\s])", r"\1", text, flags=re.MULTILINE)


def read_code_blocks(page: pathlib.Path, language: str) -> list[str]:
    """The blocks of code in one language of a page in Markdown, in order."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)


@functools.cache
def parse_package() -> dict[pathlib.Path, ast.Module]:
    """Every file of tfdist, parsed."""
    return {file: ast.parse(file.read_text()) for file in sorted((REPOSITORY / "tfdist").rglob("*.py"))}


def read_texts() -> list[tuple[str, str]]:
    """All texts of tfdist but docstrings: the file and line, and the text, with "…" for what is unknown."""
    return [(f"{file}:{line}", text) for file, tree in parse_package().items() for line, text in _texts_within(tree)]


def _texts_within(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.JoinedStr):
        yield node.lineno, _fill_holes(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Constant) and isinstance(node, ast.Expr | ast.JoinedStr)):
            yield from _texts_within(child)


def _fill_holes(text: ast.JoinedStr) -> str:
    filled = ""
    for part in text.values:
        if isinstance(part, ast.Constant):
            filled += part.value
        elif isinstance(part, ast.FormattedValue):
            name, unknown = ast.unparse(part.value), "'…'" if part.conversion == ord("r") else "…"
            filled += next((value for key, value in HOLES.items() if name == key or filled.endswith(key)), unknown)
    return filled


def wait_until(condition: Callable[[], bool], *, seconds: float) -> None:
    """Returns as soon as `condition` holds; fails the test when it does not in time, on a busy machine too."""
    deadline = time.monotonic() + PATIENCE * seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {PATIENCE * seconds:g} s"
        time.sleep(0.02)


def run_python(
    args: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 120,
    cwd: str | os.PathLike[str] | None = None,
) -> Finished:
    """Runs `python args…` in a clean environment and waits for it.

    Args:
      args: what follows the interpreter, e.g. `["-m", "tfdist.main", "--help"]`.
      env: variables set on top of the clean environment; None takes one out.
      timeout: seconds on a quiet machine; after four times as long it and all that it started is killed and the test
        fails with both outputs.
      cwd: the working directory.
    """
    return run_command([sys.executable, *args], env=env, timeout=timeout, cwd=cwd)


def run_module(
    module: str,
    *arguments: str | os.PathLike[str],
    launch: Sequence[str] | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 400,
) -> Finished:
    """`run_python` for a module of the tests; with the options `launch` of a launcher, if there are any, by that."""
    program = ["-m", module] if launch is None else ["-m", "tfdist.launch", *launch, f"--module={module}", "--"]
    return run_python([*program, *arguments], env=TESTS_PATH | dict(env or {}), timeout=timeout)


def run_command(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 120,
    cwd: str | os.PathLike[str] | None = None,
) -> Finished:
    """`run_python` for any command."""
    mark = uuid.uuid4().hex
    environment = clean_environment() | dict(env or {}) | {MARK: mark}
    # Files, not pipes: reading a pipe would wait for whatever the process leaves behind.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as stdout,
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
    ):
        process = forks.Popen(
            [os.fspath(part) for part in command],
            env={name: value for name, value in environment.items() if value is not None},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(PATIENCE * timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            kill_marked(mark)
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        finished = Finished(process.returncode, stdout.read(), stderr.read())
    if timed_out:
        line = " ".join(map(str, command))
        pytest.fail(f"not done after {PATIENCE * timeout} s, killed: {line}\n{finished.outputs()}", pytrace=False)
    return finished


def kill_marked(mark: str) -> None:
    """Kills every process that bears the mark, again and again until none is left that could start another."""
    deadline = time.monotonic() + 10
    while found := find_marked(mark):
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if time.monotonic() > deadline:
            raise TimeoutError(f"Killed, but not gone after 10 s: {found}")
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though whoever started it may not have waited for it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def find_marked(mark: str) -> list[psutil.Process]:
    """The processes that bear the mark."""
    return [process for process in psutil.process_iter() if _bears(process, mark)]


def _bears(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except psutil.Error:  # ended meanwhile, or another user's
        return False


def is_open(port: int) -> bool:
    """Whether anything listens on this port of 127.0.0.1."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    """Distinct ports of 127.0.0.1 that nothing listened on just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
