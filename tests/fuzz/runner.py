"""Runs the command many times over, each in a child forked from a process that has TensorFlow imported.

Invariant: this process computes nothing and imports no module of a case, so every child starts alike; a child has a
working directory and output files of its own and is ended after a time.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence

from tfdist import main
from tfdist.launch.child import die_with_parent

POLL_SECONDS = 0.01


@dataclasses.dataclass(frozen=True)
class Command:
    """One call of `python -m tfdist.main`.

    Attributes:
      arguments: its flags.
      directory: where it runs; it exists.
    """

    arguments: Sequence[str]
    directory: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a command ended: its exit status, negative for a signal, None where it had to be killed for its time."""

    status: int | None
    stdout: str
    stderr: str
    seconds: float


@dataclasses.dataclass
class _Child:
    index: int
    pid: int
    began: float


def prepare() -> None:
    """Imports what the children need. Call it once, before anything has used TensorFlow."""
    main.load_roots(verbose=False)
    import tfdist.config.loading
    import tfdist.tuning.schedule.sweep  # noqa: F401


def run_all(commands: Iterable[Command], *, at_once: int, seconds: float) -> Iterator[tuple[int, Ending]]:
    """Runs the commands, some at once; gives each one's place and ending, in the order in which they end."""
    waiting = enumerate(commands)
    running: dict[int, tuple[_Child, Command]] = {}
    exhausted = False
    while running or not exhausted:
        while len(running) < at_once and not exhausted:
            index, command = next(waiting, (None, None))
            if command is None:
                exhausted = True
                break
            child = _Child(index, _fork(command), time.monotonic())
            running[child.pid] = child, command
        for pid, (child, command) in list(running.items()):
            late = time.monotonic() - child.began > seconds
            if late:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                del running[pid]
                yield child.index, _ending(command, child, None if late else os.waitstatus_to_exitcode(status))
        time.sleep(POLL_SECONDS)


def _ending(command: Command, child: _Child, status: int | None) -> Ending:
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in _outputs(command)]
    return Ending(status, *texts, seconds=time.monotonic() - child.began)


def _outputs(command: Command) -> list[pathlib.Path]:
    return [command.directory.parent / f"{command.directory.name}.{name}" for name in ("stdout", "stderr")]


def _fork(command: Command) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        for descriptor, path in zip((1, 2), _outputs(command), strict=True):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, descriptor)
        os.chdir(command.directory)
        status = main.main(list(command.arguments))
    except SystemExit as error:  # as the interpreter takes it
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
