"""What the tests of monitoring share: the facts of a small run, and a receiver of OTLP over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import http.server
import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tfdist.telemetry.facts import Event, Fact, Phase, Point, RunFacts, Sample
from tfdist.telemetry.sinks.sink import Sink

RUN_ID = "0af7651916cd43dd8448eb211c80319c"
BEGIN = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def run_facts(**changed: Any) -> RunFacts:
    facts = RunFacts(
        directory="/runs/digits",
        run_id=RUN_ID,
        mode="train",
        strategy="multi_worker",
        worker=0,
        num_workers=2,
        num_replicas=2,
        settings={},
        config_text="",
        start=0,
        price_per_device_hour=30.0,
    )
    return dataclasses.replace(facts, **changed)


def tracked_facts(directory: pathlib.Path | str, **changed: Any) -> RunFacts:
    settings = {"train.epochs": "2", "train.model": "@tiny.linear", "LONG": "x" * 7000}
    return run_facts(directory=str(directory), **{"settings": settings, **changed})


def at(seconds: float) -> datetime.datetime:
    return BEGIN + datetime.timedelta(seconds=seconds)


def facts_of_a_start(*, begin: float = 0.0) -> list[Fact]:
    """Start-up, two epochs with an evaluation and a checkpoint, a warning and an error, in 60 s from `begin`."""

    def event(after: float, name: str, level: str = "info", message: str | None = None, /, **details: Any) -> Event:
        when = at(begin + after)
        return Event(name=name, level=level, worker=0, step=100, message=message, details=details, time=when)

    def point(after: float, epoch: int, split: str, metrics: Mapping[str, float]) -> Point:
        when = at(begin + after)
        return Point(step=50 * epoch, epoch=epoch, split=split, metrics=metrics, learning_rate=0.01, time=when)

    return [
        Phase(worker=0, share="import", seconds=4.0, time=at(begin + 4)),
        Phase(worker=0, share="build", seconds=6.0, time=at(begin + 10)),
        point(20, 1, "train", {"loss": 1.0, "accuracy": 0.5}),
        event(25, "checkpoint_saved", write_seconds=3.0, num_bytes=5_000_000),
        Phase(worker=0, share="evaluate", seconds=4.0, time=at(begin + 30)),
        point(30, 2, "eval", {"loss": 0.5, "accuracy": 0.75}),
        point(30, 2, "train", {"loss": 0.5, "accuracy": 0.75}),
        event(31, "straggler", "warning", "worker 1 holds up the others", slow_worker=1, by_worker=[0.1, 0.4]),
        event(32, "run_failed", "error", "out of memory"),
        Sample(
            worker=0,
            start=0,
            step=100,
            seconds={"import": 4.0, "build": 6.0, "compute": 40.0, "evaluate": 10.0},
            values={"host_memory_bytes": 3e8},
            time=at(begin + 60),
        ),
    ]


def feed(sink: Sink, facts: list[Fact]) -> None:
    for fact in facts:
        getattr(sink, type(fact).__name__.lower())(fact)


class OtlpReceiver:
    """What a collector received."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.url = ""

    def take(self, path: str, body: bytes) -> bytes:
        assert path == "/v1/traces"
        resources = ExportTraceServiceRequest.FromString(body).resource_spans
        for span in [span for resource in resources for scope in resource.scope_spans for span in scope.spans]:
            self.spans.append(
                {
                    "name": span.name,
                    "trace": span.trace_id.hex(),
                    "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "begin": span.start_time_unix_nano / 1e9,
                    "seconds": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                    "failed": span.status.code == span.status.STATUS_CODE_ERROR,
                    "said": span.status.message,
                    **{each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes},
                }
            )
        return ExportTraceServiceResponse().SerializeToString()


@contextlib.contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A collector on a free port of this machine."""
    receiver = OtlpReceiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.headers.append(dict(self.headers))
            reply = receiver.take(self.path, body)
            with contextlib.suppress(ConnectionError):
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
