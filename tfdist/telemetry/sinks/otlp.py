"""Makes spans and metrics with OpenTelemetry's SDK and sends them by OTLP over HTTP, for `opentelemetry.py`.

Invariant: nothing is registered with OpenTelemetry's globals, and no thread is started: `deliver` sends what there is.
A collector may be away for a while; spans wait for it, and metrics are sums and last values that miss nothing.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from tfdist.errors import redacted

REQUEST_SECONDS = 2.0  # with all retries
PATIENCE_SECONDS = 300.0  # as long as a collector may take to be replaced


class Otlp:
    """A tracer and a meter of one process, and the way to their collector.

    Args:
      endpoint: the collector's URL.
      resource: what is said of each span and metric.
      trace_id: of all spans.
      sample_rate: the share of traces that are sent; the same trace is sent by all processes or by none.
      sends_metrics: False where the collector takes traces alone.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        resource: Mapping[str, str | int],
        trace_id: int,
        sample_rate: float,
        sends_metrics: bool,
    ) -> None:
        self._endpoint = endpoint
        self._sends_metrics = sends_metrics
        self._reached_at = time.monotonic()
        described = Resource.create(resource)
        self._spans = InMemorySpanExporter()
        tracers = TracerProvider(
            TraceIdRatioBased(sample_rate), described, shutdown_on_exit=False, id_generator=_OneTrace(trace_id)
        )
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = tracers.get_tracer("tfdist")
        self._metrics = InMemoryMetricReader()
        self.meter = MeterProvider([self._metrics], described, shutdown_on_exit=False).get_meter("tfdist")
        self._span_exporter = OTLPSpanExporter(f"{endpoint}/v1/traces", timeout=REQUEST_SECONDS)
        self._metric_exporter = OTLPMetricExporter(f"{endpoint}/v1/metrics", timeout=REQUEST_SECONDS)

    def deliver(self, *, patience: float = PATIENCE_SECONDS) -> None:
        """Sends the spans that have ended, and all metrics.

        Raises:
          ConnectionError: the collector has taken nothing for `patience` seconds.
        """
        failure = ""
        if spans := self._spans.get_finished_spans():
            failure = _export(self._span_exporter, spans)
            if not failure:
                self._spans.clear()
        if self._sends_metrics and not failure:
            data = self._metrics.get_metrics_data()
            failure = "" if data is None else _export(self._metric_exporter, data)
        if not failure:
            self._reached_at = time.monotonic()
        elif time.monotonic() - self._reached_at >= patience:
            raise ConnectionError(f"{redacted(self._endpoint)} does not take traces or metrics: {failure}")


class _OneTrace(IdGenerator):
    """Begins each span that has no parent in the same trace.

    The SDK's own generator draws from Python's `random`, which training seeds: alike in all workers and starts.
    """

    def __init__(self, trace_id: int) -> None:
        self._trace_id = trace_id

    def generate_trace_id(self) -> int:
        return self._trace_id

    def generate_span_id(self) -> int:
        return secrets.randbelow(2**64 - 1) + 1  # 0 is no id


class _Overheard(logging.Filter):
    """Takes what an exporter would log of a failure, which it tells in no other way."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.messages.append(record.getMessage())
        return False


def _export(exporter: OTLPSpanExporter | OTLPMetricExporter, data: Any) -> str:
    """Sends; empty, or why that failed."""
    overheard = _Overheard()
    logger = logging.getLogger(type(exporter).__module__)
    logger.addFilter(overheard)
    try:
        result = exporter.export(data)
    finally:
        logger.removeFilter(overheard)
    return "" if result.name == "SUCCESS" else " ".join(overheard.messages) or "no reason is known"
