"""What the sinks of monitoring systems have in common: a run's measures, and the names that they go by.

Invariant: Prometheus and OpenTelemetry say the same, so that one dashboard reads both.
"""

from __future__ import annotations

from tfdist.telemetry.facts import RunFacts
from tfdist.telemetry.measures import Measures
from tfdist.telemetry.registry import Metric

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


def measures_of(run: RunFacts) -> Measures:
    """The measures of this process; the chief's have what all devices cost."""
    price = run.settings.get("train.price_per_device_hour")
    return Measures(
        num_devices=run.num_replicas if run.is_chief else 0,
        price_per_device_hour=None if price is None else float(price),
    )
