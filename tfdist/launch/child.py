"""Becomes one worker's command, tied to the launcher: `python child.py PARENT_PID CPUS COMMAND…`.

Invariant: the worker does not outlive its launcher, however that ends. The kernel kills it with SIGKILL when the parent
dies (PR_SET_PDEATHSIG, which survives exec). Linux only, as the launcher and sweeps are.

Run as a script by `processes.py`; a sweep's trials call `die_with_parent` alone. It is a program of its own because
code between fork and exec (`preexec_fn`) is not safe in a launcher that has threads. Imports the standard library
alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(parent_pid: int, cpus: str, command: list[str]) -> None:
    """Becomes the command, on these processors, as a process that ends when the launcher does."""
    die_with_parent(parent_pid)
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    os.execvp(command[0], command)


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent ends, and ends it at once where that has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(f"the process that started this one, {parent_pid}, is gone")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
