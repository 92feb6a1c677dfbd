"""How much memory this process may still take: of the machine, and of the control groups that it is in.

Invariant: what the kernel can give back at once, such as the cache of files, counts as free. Linux; see proc(5),
cgroups(7).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int:
    """The least of what the machine and each control group have left, in bytes.

    Args:
      root: where `proc` and `sys` are.

    Raises:
      OSError: this system does not say.
    """
    lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    return max(0, min([free, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            group = Path(path.lstrip("/"))
            for name in (group, *group.parents):
                if controllers == "memory":
                    below = root / "sys/fs/cgroup/memory" / name
                    yield from _left(below, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                elif not controllers:
                    yield from _left(root / "sys/fs/cgroup" / name, "memory.max", "memory.current", "inactive_file")


def _left(group: Path, limit: str, used: str, reclaimable: str) -> Iterator[int]:
    """What one group has left, where it has a limit that this process can see."""
    with contextlib.suppress(OSError, ValueError):  # "max": without
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        taken = int((group / used).read_text()) - int(statistics.get(reclaimable, 0))
        yield int((group / limit).read_text()) - taken
