"""What memory is left: of the machine, and of the control groups of either version."""

from __future__ import annotations

import pathlib

import pytest

from tfdist.storage.memory import available_bytes

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """A machine with 1,000 MiB left."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4096000 kB\nMemAvailable: 1024000 kB\nHugePages_Total: 0\n")
    return tmp_path


def write_group(directory: pathlib.Path, values: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (directory / name).write_text(f"{value}\n")


def test_without_control_groups_it_is_what_the_machine_has(root: pathlib.Path) -> None:
    assert available_bytes(root) == 1000 * MIB


@pytest.mark.parametrize(("limit", "left"), [(str(500 * MIB), 200), ("max", 1000), (str(100 * MIB), 0)])
def test_a_group_of_version_2_counts_without_what_it_only_caches(root: pathlib.Path, limit: str, left: int) -> None:
    (root / "proc/self/cgroup").write_text("0::/pods/one\n")
    used = {"memory.current": str(400 * MIB), "memory.stat": f"anon 5\ninactive_file {100 * MIB}"}
    write_group(root / "sys/fs/cgroup/pods/one", {"memory.max": limit, **used})
    assert available_bytes(root) == left * MIB


def test_a_group_above_counts_too_and_version_1_has_other_names(root: pathlib.Path) -> None:
    (root / "proc/self/cgroup").write_text("4:memory:/pods/one\n1:cpu:/\n0::/\n")
    for name, limit in (("pods/one", 900), ("pods", 600)):
        used = {"memory.usage_in_bytes": str(300 * MIB), "memory.stat": "cache 1\ntotal_inactive_file 0"}
        write_group(root / "sys/fs/cgroup/memory" / name, {"memory.limit_in_bytes": str(limit * MIB), **used})
    assert available_bytes(root) == 300 * MIB


@pytest.mark.slow
def test_this_machine_says_something() -> None:
    assert available_bytes() > 0
