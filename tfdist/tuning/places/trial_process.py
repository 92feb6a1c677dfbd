"""The process of a trial on this machine, which the fork server of `multiprocessing` forks with TensorFlow imported.

Invariant: the process leads a session of its own, and ends with all that it started when the sweep's process ends,
however that ends. Linux and other systems with `fork` only.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import NoReturn

from tfdist.errors import EXIT_BUG
from tfdist.launch.child import die_with_parent
from tfdist.strategies.cluster import environment

PROGRAM = "tfdist.main"


def run(command: Sequence[str], log: str, variables: Mapping[str, str], cpus: Sequence[int]) -> NoReturn:
    """Becomes a trial, and ends the process.

    Args:
      command: what follows `python -m`.
      log: the file that gets what it writes, behind what is there.
      variables: its environment.
      cpus: that it may use; none: all.
    """
    status = EXIT_BUG
    try:
        os.setsid()
        _redirect(log)
        environment.change(dict.fromkeys(environment.current()) | dict(variables))
        if cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus)
        module, *arguments = command
        if module != PROGRAM:  # the launcher's workers end with it
            die_with_parent(os.getppid())
            os.execv(sys.executable, [sys.executable, "-m", *command])
        threading.Thread(target=_end_with_sweep, name="tfdist-sweep", daemon=True).start()
        status = importlib.import_module(PROGRAM).main(arguments)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def start_fork_server() -> None:
    """Starts the process that forks trials, which imports TensorFlow at once, while this one continues."""
    forkserver.set_forkserver_preload([f"{__package__}.preload"])
    with without_main():
        forkserver.ensure_running()


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keeps `multiprocessing` from importing this program in the new process, where a script would start again."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _end_with_sweep() -> None:
    sweep = multiprocessing.parent_process()
    assert sweep is not None
    wait([sweep.sentinel])
    os.killpg(0, signal.SIGKILL)


def _redirect(log: str) -> None:
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for each in (nothing, output):
        os.close(each)
