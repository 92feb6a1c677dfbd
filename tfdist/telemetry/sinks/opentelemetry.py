"""Sends spans and metrics of a run to an OpenTelemetry collector.

Invariant: all spans of a run, of all its starts and workers, are of one trace, whose id is the run's; a span's parent
is sent before it. Named in a gin file, `train.sinks = [@opentelemetry.OpenTelemetry()]`.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist.errors import UserError, missing_extra, redacted
from tfdist.telemetry.facts import Event, Phase, Point, RunFacts, Sample, now
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.registry import COUNTER, HISTOGRAM, Metric
from tfdist.telemetry.sinks.measures import Measures
from tfdist.telemetry.sinks.sink import Sink, exposed_name
from tfdist.telemetry.stream import FAILED

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_START_UP = {"import", "connect", "data", "build", "restore"}  # of time_account.SHARES


class OpenTelemetry(Sink):
    """One trace a run, and the metrics of each worker.

    A start of the run on a worker is a span `start` without length, which is sent at once: the parent of its phases,
    epochs, checkpoints and events, and, at its end, of a span `train` (or another mode) with its whole length and how
    it ended. A start that has none was killed.

    The SDK's own variables work, too: a token belongs into OTEL_EXPORTER_OTLP_HEADERS.

    Args:
      endpoint: a collector's OTLP/HTTP receiver, without /v1/traces.
      sample_rate: the share of runs whose trace is sent; all starts and workers of a run decide alike. Metrics are
        sent of each run.
      metrics: False where the endpoint takes traces alone, as Jaeger's does.
    """

    every_worker = True

    def __init__(
        self, *, endpoint: str = "http://localhost:4318", sample_rate: float = 1.0, metrics: bool = True
    ) -> None:
        try:
            import opentelemetry.exporter.otlp.proto.http  # noqa: F401
        except ImportError:
            package = "opentelemetry-exporter-otlp-proto-http"
            raise missing_extra(package, "opentelemetry", "Sending traces and metrics to OpenTelemetry") from None
        if not endpoint.startswith(("http://", "https://")):
            raise UserError(
                "opentelemetry.OpenTelemetry.endpoint must be the URL of a collector's OTLP/HTTP receiver, such as "
                f"'http://localhost:4318'. Received: {redacted(endpoint)!r}."
            )
        if not 0 <= sample_rate <= 1:
            raise UserError(f"opentelemetry.OpenTelemetry.sample_rate must be from 0 to 1. Received: {sample_rate!r}.")
        self._endpoint = endpoint.rstrip("/")
        self._sample_rate = sample_rate
        self._sends_metrics = metrics

    def open(self, run: RunFacts) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        from tfdist.telemetry.sinks.otlp import Otlp

        self._run = run
        self._measures = Measures(run)
        self._instruments: dict[str, Any] = {}
        self._began = self._epoch_began = now()
        self._last_point: Point | None = None
        self._otlp = Otlp(
            self._endpoint,
            resource={
                "service.name": "tfdist",
                "service.instance.id": f"{run.run_id}-{run.worker}",
                "job_id": run.run_id,
                "worker": run.worker,
            },
            trace_id=int(run.run_id, 16),
            sample_rate=self._sample_rate,
            sends_metrics=self._sends_metrics,
        )
        self._parent = Context()
        names = ("mode", "strategy", "num_workers", "num_replicas", "directory")
        start = self._span("start", self._began, self._began, {name: getattr(run, name) for name in names})
        self._parent = set_span_in_context(start)
        self._otlp.deliver()

    def event(self, event: Event) -> None:
        self._measure(event)
        seconds = event.details["write_seconds"] if event.name == "checkpoint_committed" else 0.0
        told = {"step": event.step, "level": event.level, "message": event.message}
        begin = event.time - datetime.timedelta(seconds=seconds)
        self._span(event.name, begin, event.time, {**event.details, **told}, failed=event.level == "error")

    def point(self, point: Point) -> None:
        self._measure(point)
        if self._last_point is not None and point.epoch != self._last_point.epoch:
            self._end_epoch(self._last_point)
        self._last_point = point

    def sample(self, sample: Sample) -> None:
        self._measure(sample)
        self._otlp.deliver()

    def phase(self, phase: Phase) -> None:
        self._span(phase.share, phase.time - datetime.timedelta(seconds=phase.seconds), phase.time, {})
        if phase.share in _START_UP:
            self._epoch_began = phase.time

    def close(self, status: str) -> None:
        if self._last_point is not None:
            self._end_epoch(self._last_point)
        self._span(self._run.mode, self._began, now(), {"status": status}, failed=status == FAILED)
        self._otlp.deliver(patience=0)

    def _end_epoch(self, last: Point) -> None:
        self._span("epoch", self._epoch_began, last.time, {"epoch": last.epoch, "step": last.step})
        self._epoch_began = last.time

    def _span(
        self,
        name: str,
        begin: datetime.datetime,
        end: datetime.datetime,
        details: Mapping[str, Any],
        *,
        failed: bool = False,
    ) -> Span:
        from opentelemetry.trace import StatusCode

        self._began = min(begin, self._began)  # importing and connecting came before the sink
        of_start = {"start": self._run.start, "worker": self._run.worker}
        span = self._otlp.tracer.start_span(
            name, self._parent, attributes=_attributes({**details, **of_start}), start_time=_nanoseconds(begin)
        )
        if failed:
            span.set_status(StatusCode.ERROR, details.get("message"))
        span.end(_nanoseconds(end))
        return span

    def _measure(self, fact: Event | Point | Sample) -> None:
        for found in self._measures.of(fact):
            metric = found.metric
            if not math.isfinite(found.value):
                continue  # the SDK takes none; loss_is_finite tells of it
            if metric.name not in self._instruments:
                self._instruments[metric.name] = self._instrument(metric)
            self._instruments[metric.name](found.value, dict(found.labels))

    def _instrument(self, metric: Metric) -> Any:
        """What takes a value of the metric, and its labels."""
        named = exposed_name(metric), "", metric.meaning  # with a unit, Prometheus would see another name
        meter = self._otlp.meter
        if metric.kind == COUNTER:
            return meter.create_counter(*named).add
        if metric.kind == HISTOGRAM:
            return meter.create_histogram(*named, explicit_bucket_boundaries_advisory=metric.buckets).record
        return meter.create_gauge(*named).set


def _attributes(values: Mapping[str, Any]) -> dict[str, str | bool | int | float]:
    """What a span can bear of them: others than numbers and texts as JSON."""
    return {
        f"tfdist.{name}": value if isinstance(value, str | bool | int | float) else to_json(value)
        for name, value in values.items()
        if value is not None
    }


def _nanoseconds(time: datetime.datetime) -> int:
    return int(time.timestamp() * 1e9)
