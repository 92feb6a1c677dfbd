"""The measurements of plan.py, each to be run in a process of its own."""

from __future__ import annotations

import os
import tempfile

from measuring import Figure, peak_growth
from plan_models import EXAMPLES

from tfdist import experiment
from tfdist.planning.traced_step import step_of
from tfdist.telemetry.console.console import NullConsole
from tfdist.training.run.run import Request
from tfdist.training.run.settings import TrainSettings


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
