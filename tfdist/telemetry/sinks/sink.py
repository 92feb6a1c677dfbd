"""What takes the facts of a run elsewhere: to a tracker, a monitoring system, a program of the user's.

A gin file names them, `train.sinks = [@prometheus.Prometheus()]`. One of the user's own is a subclass of `Sink`.
"""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.errors import UserError, missing_extra
from tfdist.telemetry.facts import Event, Phase, Point, RunFacts, Sample


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
        """Ends, after the last fact. `status`: DONE, PAUSED, PREEMPTED or FAILED."""


DONE, PAUSED, PREEMPTED, FAILED = "done", "paused", "preempted", "failed"  # what `Sink.close` gets


class Tracker(Sink):
    """A sink that keeps numbers by step, under the names of docs/trackers.md; a subclass gives `log`."""

    def log(self, numbers: Mapping[str, float], step: int, time: datetime.datetime) -> None:
        """Takes numbers of a step."""

    def point(self, point: Point) -> None:
        numbers = {f"{point.split}/{name}": float(v) for name, v in point.metrics.items() if np.ndim(v) == 0}
        if point.split == "train" and point.learning_rate is not None:
            numbers["learning_rate"] = float(point.learning_rate)
        self.log(numbers | {"epoch": float(point.epoch)}, point.step, point.time)

    def sample(self, sample: Sample) -> None:
        numbers = {f"system/{name}": float(value) for name, value in sample.values.items()}
        numbers |= {f"time/{share}": float(seconds) for share, seconds in sample.seconds.items()}
        self.log(numbers, sample.step or 0, sample.time)


def describe_run(run: RunFacts) -> dict[str, Any]:
    """What trackers keep of a run beside its settings."""
    return {name: getattr(run, name) for name in ("strategy", "num_workers", "num_replicas", "start", "directory")}


def check_client(sink: str, module: str, package: str, texts: Mapping[str, object]) -> None:
    """Raises UserError where an argument is not a text or None, or a tracker's client is not installed."""
    for name, value in texts.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise UserError(f"{sink}.{name} must be a text; received {value!r}.")
    if importlib.util.find_spec(module) is None:
        raise missing_extra(package, module, f"{module}.{sink}")
