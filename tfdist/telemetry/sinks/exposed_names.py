"""The name by which monitoring systems know a metric of the registry.

Invariant: Prometheus and OpenTelemetry say the same, so that one dashboard reads both.
"""

from __future__ import annotations

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
