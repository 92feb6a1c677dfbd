"""What --mode=plan says of memory, beside the peak of a training's process: predicted ÷ measured, within 0.85 and 1.2.

Six models × two precisions × one and four microbatches × with and without gradient checkpointing; every cell is
predicted in one process and measured in another. Takes half an hour, and up to 2.5 GB.

    python benchmarks/plan.py [--part=MODEL] [--quick] [--json=FILE]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from measuring import Figure, choose_size, figures_of, report

PARTS = ("mlp", "convnet", "transformer", "embedding", "recurrent", "unet")
PRECISIONS = ("float32", "bfloat16")
LEAST, MOST = 0.85, 1.2


def measure(parts: Sequence[str], quick: bool) -> list[Figure]:
    figures = []
    precisions, numbers = (PRECISIONS[:1], (1,)) if quick else (PRECISIONS, (1, 4))
    cells = itertools.product(parts, precisions, numbers, choose_size(("keep", "recompute"), ("recompute",)))
    for cell in cells:
        name = " ".join(map(str, cell))
        told, found = (figures_of("plan_parts", part, *cell)[0].ours for part in ("predicted", "measured"))
        value = told / found
        print(f"{name}: {told:.0f} MB predicted, {found:.0f} MB measured, {value:.2f}", flush=True)
        figures.append(Figure(f"{name}: not too low", value, LEAST, (value, value), told, found, "MB"))
        figures.append(Figure(f"{name}: not too high", value, MOST, (value, value), told, found, "MB", at_most=True))
    return figures


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, has_quick=True)
