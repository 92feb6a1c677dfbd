"""What takes the facts of a run elsewhere: to a tracker, a monitoring system, a program of the user's.

A gin file names them, `train.sinks = [@prometheus.Prometheus()]`. One of the user's own is a subclass of `Sink`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import numpy as np

from tfdist.errors import UserError, missing_extra
from tfdist.telemetry.facts import Event, Phase, Point, RunFacts, Sample
from tfdist.telemetry.registry import Metric


class Sink:
    """Takes facts, on a thread of its own.

    Invariant: all methods of a sink are called by one thread, in the order of the facts, never the training's. A sink
    that raises, or does not return for a while, is dropped with one warning, and the run goes on without it. So a
    method may wait for a network; it should give up by itself after some seconds.

    The constructor raises UserError for what a user got wrong, a library that is not installed included; sockets,
    threads and clients are made in `open`.

    Example:

        class Shouts(Sink):
            def event(self, event):
                if event.level == "error":
                    requests.post("https://example.org/alerts", event.message, timeout=5)

    Attributes:
      every_worker: whether each worker has one of its own; if not, the chief alone. Points are the chief's in any case.
    """

    every_worker: bool = False

    def open(self, run: RunFacts) -> None:
        """Begins, before any fact; a run that resumes begins again in another process."""

    def event(self, event: Event) -> None:
        """Takes an event of this worker."""

    def point(self, point: Point) -> None:
        """Takes a point of the run's metrics."""

    def sample(self, sample: Sample) -> None:
        """Takes a sample of this worker's process."""

    def phase(self, phase: Phase) -> None:
        """Takes a phase of this worker that is over; those before `open` come first."""

    def close(self, status: str) -> None:
        """Ends, after the last fact. `status`: "done", "paused", "preempted" or "failed"."""


_PREFIX = "tfdist_"
# The names that operators' dashboards have had for other trainers, too.
_COMMON = {
    "training_duration_seconds",
    "gpu_utilization",
    "training_loss",
    "learning_rate",
    "checkpoint_size_mb",
    "cost_usd",
}


def exposed_name(metric: Metric) -> str:
    """The metric's own name where operators know it, else the name with tfdist's prefix."""
    return metric.name if metric.name in _COMMON else _PREFIX + metric.name


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
