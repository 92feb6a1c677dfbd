"""What tests of trackers share: the facts of a small run, told to a sink."""

from __future__ import annotations

import pathlib
from typing import Any

import monitoring_support

from tfdist.telemetry.facts import Point, RunFacts, Sample
from tfdist.telemetry.sinks.sink import Sink

SETTINGS = {"train.epochs": "2", "train.model": "@tiny.linear", "LONG": "x" * 7000}


def run_facts(directory: pathlib.Path | str, **changed: Any) -> RunFacts:
    return monitoring_support.run_facts(directory=str(directory), **{"settings": SETTINGS, **changed})


def point(step: int, loss: float, split: str = "train") -> Point:
    metrics = {"loss": loss, "gradient_norm/kernel$": 2.0, "per_class": [1.0, 2.0]}
    return Point(step=step, epoch=1, split=split, metrics=metrics, learning_rate=0.1)


def tell(sink: Sink, run: RunFacts, steps: range, status: str) -> None:
    """Tells a sink of a run from its beginning to its end."""
    sink.open(run)
    for step in steps:
        sink.point(point(step, 1 / step))
        values = {"host_memory_bytes": 1e9}
        sink.sample(Sample(worker=0, start=run.start, step=step, seconds={"computing": 2.0}, values=values))
    sink.point(point(steps[-1], 0.25, "eval"))
    sink.close(status)
