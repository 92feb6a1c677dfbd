"""Sends the spans of a run to an OpenTelemetry collector, by OpenTelemetry's SDK.

Invariant: all spans of a run, of all its starts and workers, are of one trace, whose id is the run's; a span's parent
is sent before it. Nothing is registered with OpenTelemetry's globals. A thread of the SDK's sends, so no method waits.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Mapping
from typing import Any

from tfdist.errors import UserError, missing_extra, redact
from tfdist.telemetry.facts import Event, Phase, Point, RunFacts, now
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.sinks.sink import FAILED, Sink

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.trace import StatusCode, set_span_in_context
except ImportError:
    package = "opentelemetry-exporter-otlp-proto-http"
    raise missing_extra(package, "opentelemetry", "Sending traces to OpenTelemetry") from None

AWAY_SECONDS = 60.0  # for which spans wait for a collector


class _OneTrace(RandomIdGenerator):
    """All spans of one trace; the SDK's own ids come from `random`, which training seeds alike in all workers."""

    def __init__(self, trace_id: int) -> None:
        self._trace_id = trace_id

    def generate_trace_id(self) -> int:
        return self._trace_id

    def generate_span_id(self) -> int:
        return secrets.randbelow(2**64 - 1) + 1  # 0 is not an id


class OpenTelemetry(Sink):
    """One trace a run.

    A start of the run on a worker is a span `start` without length, which is sent soon: the parent of its phases,
    epochs, checkpoints and events, and, at its end, of a span `train` (or another mode) with its whole length and how
    it ended. A start that has none was killed. The SDK's own variables work: a token belongs into
    OTEL_EXPORTER_OTLP_HEADERS.

    Args:
      endpoint: a collector's OTLP/HTTP receiver, without /v1/traces.
    """

    every_worker = True

    def __init__(self, *, endpoint: str = "http://localhost:4318") -> None:
        if not str(endpoint).startswith(("http://", "https://")):
            raise UserError(
                "opentelemetry.OpenTelemetry.endpoint must be the URL of a collector's OTLP/HTTP receiver, such as "
                f"'http://localhost:4318'. Received: {redact(str(endpoint))!r}."
            )
        self._endpoint = endpoint.rstrip("/")

    def open(self, run: RunFacts) -> None:
        self._run = run
        name = {"service.name": "tfdist", "service.instance.id": f"{run.run_id}-{run.worker}"}
        self._tracers = TracerProvider(
            resource=Resource.create({**name, "job_id": run.run_id, "worker": run.worker}),
            shutdown_on_exit=False,
            id_generator=_OneTrace(int(run.run_id, 16)),
        )
        exporter = OTLPSpanExporter(f"{self._endpoint}/v1/traces", timeout=AWAY_SECONDS)
        self._tracers.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._tracers.get_tracer("tfdist")
        self._began = self._epoch_began = now()
        self._last_point: Point | None = None
        names = ("mode", "strategy", "num_workers", "num_replicas", "directory")
        self._parent = Context()
        start = self._add_span("start", self._began, self._began, {name: getattr(run, name) for name in names})
        self._parent = set_span_in_context(start)

    def event(self, event: Event) -> None:
        seconds = event.details.get("write_seconds", 0.0) if event.name == "checkpoint_saved" else 0.0
        details = {**event.details, "step": event.step, "level": event.level, "message": event.message}
        begin = event.time - datetime.timedelta(seconds=seconds)
        self._add_span(event.name, begin, event.time, details, failed=event.level == "error")

    def point(self, point: Point) -> None:
        if self._last_point is not None and point.epoch != self._last_point.epoch:
            self._end_epoch(self._last_point)
        self._last_point = point

    def phase(self, phase: Phase) -> None:
        self._add_span(phase.share, phase.time - datetime.timedelta(seconds=phase.seconds), phase.time, {})
        if phase.share not in ("evaluate", "checkpoint"):  # the first epoch begins when the start-up is over
            self._epoch_began = phase.time

    def close(self, status: str) -> None:
        if self._last_point is not None:
            self._end_epoch(self._last_point)
        self._add_span(self._run.mode, self._began, now(), {"status": status}, failed=status == FAILED)
        self._tracers.shutdown()

    def _end_epoch(self, last: Point) -> None:
        self._add_span("epoch", self._epoch_began, last.time, {"epoch": last.epoch, "step": last.step})
        self._epoch_began = last.time

    def _add_span(
        self,
        name: str,
        begin: datetime.datetime,
        end: datetime.datetime,
        details: Mapping[str, Any],
        failed: bool = False,
    ) -> Any:
        self._began = min(begin, self._began)  # importing and connecting came before the sink
        values = {**details, "start": self._run.start, "worker": self._run.worker}
        attributes = {
            f"tfdist.{key}": value if isinstance(value, str | bool | int | float) else to_json(value)
            for key, value in values.items()
            if value is not None
        }
        span = self._tracer.start_span(name, self._parent, attributes=attributes, start_time=_nanoseconds(begin))
        if failed:
            span.set_status(StatusCode.ERROR, details.get("message"))
        span.end(_nanoseconds(end))
        return span


def _nanoseconds(time: datetime.datetime) -> int:
    return int(time.timestamp() * 1e9)
