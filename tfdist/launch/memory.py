"""Whether the kernel killed a process of this machine for want of memory, which its status 137 alone does not tell."""

from __future__ import annotations

import contextlib
import pathlib

EXIT_KILLED = 137  # 128 + SIGKILL
LACKED = "out of memory"
KILLED = f"the kernel killed a process here for want of memory: {LACKED}"
# cgroups(7), version 2: this container's own count. Else proc(5): the machine's, since Linux 4.13.
_COUNTERS = (pathlib.Path("/sys/fs/cgroup/memory.events"), pathlib.Path("/proc/vmstat"))


def count_kills() -> int:
    """How often this container, or the machine, killed a process for want of memory since it was started."""
    for path in _COUNTERS:
        with contextlib.suppress(OSError):
            counts = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def explain_kill(status: int, kills_before: int) -> str:
    """A line on the end of a process where the kernel killed it for want of memory; else empty."""
    return f"{KILLED}\n" if status == EXIT_KILLED and count_kills() > kills_before else ""
