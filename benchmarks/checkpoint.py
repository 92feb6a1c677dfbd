"""What checkpoints cost: beside Keras's BackupAndRestore, beside no checkpoint, and beside plain reading.

202 MB of state (16.8 million weights and Adam's two slots). The stall is what the loop waits for at a checkpoint.
Goodput is the share of an undisturbed run's steps that is left when the process is killed now and then: every 20 s with
epochs of some 5 s, or every 60 s with epochs of some two minutes. Takes half an hour.

    python benchmarks/checkpoint.py [--part=PART] [--quick] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from goodput import goodput
from measuring import Figure, as_table, figures_of, report

PARTS = ("stall", "writing", "restoring", "goodput", "goodput_long")


def measure(parts: Sequence[str], *, quick: bool) -> list[Figure]:
    found = []
    for part in parts:
        figures = _figures(part, quick=quick)
        print(as_table(figures), flush=True)  # the whole takes long, and may be cut off
        found += figures
    return found


def _figures(part: str, *, quick: bool) -> list[Figure]:
    if part == "goodput":
        if quick:
            return goodput(mean_seconds=16, num_kills=1, alone_seconds=12, steps_per_epoch=50, goal=1.0)
        return goodput(mean_seconds=20, num_kills=10, alone_seconds=60, steps_per_epoch=50, goal=1.0)
    if part == "goodput_long":
        return goodput(mean_seconds=60, num_kills=2 if quick else 5, alone_seconds=60, steps_per_epoch=1200, goal=2.0)
    rounds = {"stall": 5, "writing": 3, "restoring": 5} if quick else {"stall": 11, "writing": 6, "restoring": 9}
    if part == "writing":
        return [f for threads in (2, 1) for f in figures_of("checkpoint_parts", part, rounds[part], threads)]
    return figures_of("checkpoint_parts", part, rounds[part])


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, has_quick=True)
