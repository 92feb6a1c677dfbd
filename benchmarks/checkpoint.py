"""What checkpoints cost: beside Keras's BackupAndRestore, beside no checkpoint, and beside plain reading.

202 MB of state (16.8 million weights and Adam's two slots). The stall is what the loop waits for at a checkpoint.
Goodput is the share of an undisturbed run's steps that is left when the process is killed now and then: every 20 s with
epochs of some 5 s, or every 60 s with epochs of some two minutes. Takes half an hour.

    python benchmarks/checkpoint.py [--part=PART] [--quick] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from goodput import goodput
from measuring import Figure, as_table, choose_size, figures_of, report

PARTS = ("stall", "writing", "restoring", "goodput", "goodput_long")
ROUNDS = {"stall": (11, 5), "writing": (6, 3), "restoring": (9, 5)}  # and with --quick
GOODPUT = {
    "goodput": (
        {"mean_seconds": 20, "num_kills": 10, "alone_seconds": 60, "steps_per_epoch": 50, "goal": 1.0},
        {"mean_seconds": 16, "num_kills": 1, "alone_seconds": 12, "steps_per_epoch": 50, "goal": 1.0},
    ),
    "goodput_long": (
        {"mean_seconds": 60, "num_kills": 5, "alone_seconds": 60, "steps_per_epoch": 1200, "goal": 2.0},
        {"mean_seconds": 60, "num_kills": 2, "alone_seconds": 60, "steps_per_epoch": 1200, "goal": 2.0},
    ),
}
SMOKE_GOODPUT = {"mean_seconds": 1, "num_kills": 1, "alone_seconds": 1, "steps_per_epoch": 4, "goal": 1.0}


def measure(parts: Sequence[str], *, quick: bool) -> list[Figure]:
    found = []
    for part in parts:
        figures = _figures(part, quick=quick)
        print(as_table(figures), flush=True)  # the whole takes long, and may be cut off
        found += figures
    return found


def _figures(part: str, *, quick: bool) -> list[Figure]:
    if part in GOODPUT:
        return goodput(**choose_size(GOODPUT[part][quick], SMOKE_GOODPUT))
    rounds = choose_size(ROUNDS[part][quick], 1)
    if part == "writing":
        all_threads = choose_size((2, 1), (2,))
        return [f for threads in all_threads for f in figures_of("checkpoint_parts", part, rounds, threads)]
    return figures_of("checkpoint_parts", part, rounds)


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, has_quick=True)
