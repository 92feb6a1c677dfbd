"""How often this machine killed a process for want of memory."""

from __future__ import annotations

import contextlib
import pathlib

OUT_OF_MEMORY = "the kernel killed a process here for want of memory: out of memory"
# cgroups(7), version 2: this container's own count. Else proc(5): the machine's, since Linux 4.13.
_COUNTERS = (pathlib.Path("/sys/fs/cgroup/memory.events"), pathlib.Path("/proc/vmstat"))


def memory_kills() -> int:
    """The count since the container, or the machine, was started."""
    for path in _COUNTERS:
        with contextlib.suppress(OSError):
            counts = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0
