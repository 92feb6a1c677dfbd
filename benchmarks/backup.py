"""What backups cost: beside Keras's BackupAndRestore, beside no backup, and beside plain reading.

202 MB of state (16.8 million weights and Adam's two slots). The stall is what the loop waits for at a backup. Goodput
is the share of an undisturbed run's steps that is left when the process is killed now and then: the kills come six
times as often as one every two minutes, with all else at its full size, which is harder. Takes six minutes
or more.

    python benchmarks/backup.py [--quick] [--json=FILE]
"""

from __future__ import annotations

from goodput import goodput
from measuring import Figure, as_table, figures_of, report


def measure() -> list[Figure]:
    return [*_costs(stall=11, writing=6, restoring=9), *goodput(mean_seconds=20, num_kills=2, alone_seconds=20)]


def measure_quickly() -> list[Figure]:
    return [*_costs(stall=5, writing=3, restoring=5), *goodput(mean_seconds=16, num_kills=1, alone_seconds=12)]


def _costs(*, stall: int, writing: int, restoring: int) -> list[Figure]:
    parts = [("stall", stall), ("writing", writing, 2), ("writing", writing, 1), ("restoring", restoring)]
    found = []
    for part in parts:
        figures = figures_of("backup_parts", *part)
        print(as_table(figures), flush=True)  # the whole takes long, and may be cut off
        found += figures
    return found


if __name__ == "__main__":
    report(__doc__, measure, measure_quickly=measure_quickly)
