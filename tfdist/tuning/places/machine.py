"""What a machine has for trials: its GPUs, and how often it killed a process for memory."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Sequence

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


def shares(devices: Sequence[str], count: int) -> list[list[str]]:
    """The devices dealt to `count` places in equal parts; one is shared only if there are too few."""
    if count > len(devices):
        return [[devices[index % len(devices)]] for index in range(count)]
    size = len(devices) // count
    return [list(devices[index * size : (index + 1) * size]) for index in range(count)]


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
