"""What --mode=plan says of memory, beside the peak of a training's process: predicted ÷ measured, within 0.85 and 1.2.

Six models × two precisions × one and four microbatches × with and without gradient checkpointing; every cell is
predicted in one process and measured in another. Takes half an hour, and up to 2.5 GB.

    python benchmarks/plan.py [--part=MODEL] [--quick] [--json=FILE]
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence

from measuring import Figure, choose_size, figures_of, peak_growth, report
from plan_models import EXAMPLES

from tfdist import experiment
from tfdist.planning.traced_step import step_of
from tfdist.telemetry.console.console import NullConsole
from tfdist.training.run.request import Request
from tfdist.training.run.settings import TrainSettings

PARTS = ("mlp", "convnet", "transformer", "embedding", "recurrent", "unet")
PRECISIONS = ("float32", "bfloat16")
LEAST, MOST = 0.85, 1.2


def measure(parts: Sequence[str], quick: bool) -> list[Figure]:
    figures = []
    precisions, numbers = (PRECISIONS[:1], (1,)) if quick else (PRECISIONS, (1, 4))
    cells = itertools.product(parts, precisions, numbers, choose_size(("keep", "recompute"), ("recompute",)))
    for cell in cells:
        name = " ".join(map(str, cell))
        told, found = (figures_of("plan", part, *cell)[0].ours for part in ("predicted", "measured"))
        value = told / found
        print(f"{name}: {told:.0f} MB predicted, {found:.0f} MB measured, {value:.2f}", flush=True)
        figures.append(Figure(f"{name}: not too low", value, LEAST, (value, value), told, found, "MB"))
        figures.append(Figure(f"{name}: not too high", value, MOST, (value, value), told, found, "MB", at_most=True))
    return figures


def settings_of(name: str, precision: str, num_microbatches: str, recomputes: str) -> TrainSettings:
    return EXAMPLES[name].settings(precision, int(num_microbatches), recomputes=recomputes == "recompute")


def measured(*cell: str) -> list[Figure]:
    """By how many MB the peak of this process grows in two steps of a training, its building included."""
    settings = settings_of(*cell)
    with tempfile.TemporaryDirectory() as scratch:
        request = Request(os.path.join(scratch, "run"), keeps=False, console=lambda is_chief: NullConsole())
        return peak_growth("measured", lambda: experiment.train(settings, request))


def predicted(*cell: str) -> list[Figure]:
    """By how many MB it is said to grow."""
    settings = settings_of(*cell)
    assert isinstance(settings.num_microbatches, int)
    rows = settings.global_batch_size // settings.num_microbatches
    threads = len(os.sched_getaffinity(0))
    step = step_of(settings, rows=rows, num_microbatches=settings.num_microbatches, num_threads=threads)
    told = step.host_bytes / 2**20
    return [Figure("predicted", told, None, (told, told), told, told, "MB")]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, has_quick=True)
