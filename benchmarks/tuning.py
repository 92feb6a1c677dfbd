"""What a sweep costs beside the trainings in it, and beside KerasTuner's own.

The parts: how busy two workers are while one trial takes twice as long as the others; how often an oracle is asked, and
how long the command lasts after its last trial, beside KerasTuner's chief with two workers over gRPC; what is added to
each trial, beside KerasTuner's tuner in one process; on a Ray cluster the same beside Ray Tune (`pip install
'ray[tune]'`), and how soon either's ASHA reaches a score. Takes half an hour.

    python benchmarks/tuning.py [--part=PART] [--quick] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

import tuning_parts
from measuring import Figure, as_table, report

PARTS = {
    "busy": ({"rounds": 3, "num_trials": 17, "seconds": 2.0}, {"rounds": 1, "num_trials": 9, "seconds": 2.0}),
    "ending": ({"rounds": 3}, {"rounds": 1}),
    "added": ({"rounds": 5, "num_trials": 8, "epochs": 3}, {"rounds": 2, "num_trials": 4, "epochs": 3}),
    "ray": (
        {"rounds": 5, "num_trials": 10, "epochs": 3, "busy_trials": 17},
        {"rounds": 2, "num_trials": 8, "epochs": 3, "busy_trials": 9},
    ),
    "ray_asha": ({"rounds": 5, "num_trials": 16}, {"rounds": 2, "num_trials": 12}),
}


def measure(parts: Sequence[str], *, quick: bool) -> list[Figure]:
    found = []
    for part in parts:
        figures = getattr(tuning_parts, part)(**PARTS[part][quick])
        print(as_table(figures), flush=True)  # the whole takes long, and may be cut off
        found += figures
    return found


if __name__ == "__main__":
    report(__doc__, measure, parts=tuple(PARTS), has_quick=True)
