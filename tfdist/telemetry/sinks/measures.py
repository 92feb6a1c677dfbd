"""The metrics of `registry.METRICS` as facts give them, for sinks of monitoring systems.

Invariant: a counter comes as what it has grown by since the fact before, so that whoever adds up has its value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfdist.telemetry.facts import Event, Point, RunFacts, Sample
from tfdist.telemetry.registry import METRICS, Metric

TRAIN = "train"
BYTES_PER_MB = 1e6
SECONDS_PER_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A counter's growth, a histogram's observation or a gauge's value."""

    metric: Metric
    value: float
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Measures:
    """Of one process of a run; the chief's tell what the whole run costs."""

    def __init__(self, run: RunFacts) -> None:
        price = run.price_per_device_hour if run.is_chief else None
        self._dollars_per_second = run.num_replicas * (price or 0.0) / SECONDS_PER_HOUR
        self._seconds: Mapping[str, float] = {}
        self._step: int | None = None
        self._stored_at: float | None = None

    def of(self, fact: Event | Point | Sample) -> list[Measurement]:
        """What the fact says, in the registry's names."""
        if isinstance(fact, Event):
            return list(self._of_event(fact))
        return list(self._of_point(fact) if isinstance(fact, Point) else self._of_sample(fact))

    def _of_event(self, event: Event) -> Iterator[Measurement]:
        yield _measured("events_total", 1, event=event.name, level=event.level)
        if event.name == "checkpoint_saved":
            moment = event.time.timestamp()
            yield _measured("checkpoint_size_mb", event.details["num_bytes"] / BYTES_PER_MB)
            yield _measured("checkpoint_write_seconds", event.details["write_seconds"])
            yield _measured("last_checkpoint_timestamp_seconds", moment)
            if self._stored_at is not None:
                yield _measured("checkpoint_interval_seconds", moment - self._stored_at)
            self._stored_at = moment
        elif event.name in ("run_finished", "run_paused", "preempted", "run_failed"):
            yield _measured("training_duration_seconds", sum(self._seconds.values()))
        elif event.name == "training_diverged":
            yield _measured("loss_is_finite", 0)

    def _of_point(self, point: Point) -> Iterator[Measurement]:
        numbers = {name: float(value) for name, value in point.metrics.items() if _is_number(value)}
        for name, value in numbers.items():
            yield _measured("metric_value", value, split=point.split, name=name)
        if point.split == TRAIN and "loss" in numbers:
            yield _measured("training_loss", numbers["loss"])
            yield _measured("loss_is_finite", math.isfinite(numbers["loss"]))
        if point.learning_rate is not None:
            yield _measured("learning_rate", point.learning_rate)

    def _of_sample(self, sample: Sample) -> Iterator[Measurement]:
        before, self._seconds = self._seconds, sample.seconds
        grown = {share: seconds - before.get(share, 0.0) for share, seconds in sample.seconds.items()}
        for share, seconds in grown.items():
            yield _measured("time_seconds_total", max(0.0, seconds), share=share)
        total = sum(sample.seconds.values())
        yield _measured("compute_share", sample.seconds.get("compute", 0.0) / total if total else 0.0)
        if self._dollars_per_second:
            yield _measured("cost_usd", max(0.0, sum(grown.values())) * self._dollars_per_second)
        if sample.step is not None:
            yield _measured("training_steps", sample.step)
            if sample.step != self._step:
                yield _measured("last_step_timestamp_seconds", sample.time.timestamp())
            self._step = sample.step
        for name, value in sample.values.items():
            yield _measured(name, value)


def _measured(metric: str, value: float, /, **labels: str) -> Measurement:
    return Measurement(METRICS[metric], float(value), labels)


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number)
