"""What trackers are given of a run, under the names that they show it by.

Invariant: the names are the same in every tracker; `docs/trackers.md` has them. Used by the sinks `mlflow` and `wandb`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import numpy as np

from tfdist.errors import UserError, missing_extra
from tfdist.telemetry.facts import Point, Sample

FAILED, PREEMPTED = "failed", "preempted"  # what `Sink.close` is told


def numbers_of_point(point: Point) -> dict[str, float]:
    """The single numbers of a point: `SPLIT/METRIC`, `epoch`, and with the training's the learning rate."""
    found = {f"{point.split}/{name}": float(value) for name, value in point.metrics.items() if np.ndim(value) == 0}
    if point.split == "train" and point.learning_rate is not None:
        found["learning_rate"] = float(point.learning_rate)
    return found | {"epoch": float(point.epoch)}


def numbers_of_sample(sample: Sample) -> dict[str, float]:
    """What the process has used, `system/NAME`, and its seconds, `time/SHARE`."""
    used = {f"system/{name}": float(value) for name, value in sample.values.items()}
    return used | {f"time/{share}": float(seconds) for share, seconds in sample.seconds.items()}


def check_texts(sink: str, given: Mapping[str, object]) -> None:
    """Raises UserError where what should be a text, or None, is something else."""
    for name, value in given.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise UserError(f"{sink}.{name} must be a text; received {value!r}.")


def check_installed(module: str, package: str, extra: str, sink: str) -> None:
    """Raises UserError where a tracker's client is not installed, without importing it."""
    if importlib.util.find_spec(module) is None:
        raise missing_extra(package, extra, sink)
