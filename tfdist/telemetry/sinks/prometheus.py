"""Shows the metrics of a run to Prometheus: by HTTP, or in a file that node_exporter reads.

Invariant: each series bears job_id, the run's id, and worker, the process's index; nothing is registered with the
client's global registry. Named in a gin file, `train.sinks = [@prometheus.Prometheus()]`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.errors import UserError, check_package
from tfdist.telemetry.facts import Event, Point, RunFacts, Sample
from tfdist.telemetry.registry import COUNTER, EVENTS, GAUGE, HISTOGRAM, METRICS, Metric
from tfdist.telemetry.sinks.sink import FAILED, Sink

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_MAX_PORT = 65535
MAX_CONNECTIONS, IDLE_SECONDS = 16, 5.0


class Prometheus(Sink):
    """Serves http://ADDRESS:PORT/metrics, or keeps a file of the same, or both; each worker its own.

    Args:
      port: of worker 0; worker k listens on `port` + k, so that several have room on one machine.
      address: the interface to listen on. Whoever reaches it can read the metrics.
      textfile_directory: where node_exporter looks (its --collector.textfile.directory). Each worker replaces
        tfdist-JOB_ID-WORKER.prom there with every sample. At its end it removes the file, but not after a failure: what
        a run left that failed, or was killed, lets alerts fire until it resumes or somebody removes it.
    """

    every_worker = True

    def __init__(
        self, *, port: int | None = None, address: str = "127.0.0.1", textfile_directory: str | None = None
    ) -> None:
        check_package("prometheus_client", "prometheus-client", "prometheus", "Metrics for Prometheus")
        if port is None and textfile_directory is None:
            raise UserError(
                "prometheus.Prometheus has neither a port nor a textfile_directory, so that nobody could read its "
                "metrics. Write prometheus.Prometheus.port = 9400, for example."
            )
        if port is not None and (not isinstance(port, int) or not 0 < port <= _MAX_PORT):
            raise UserError(f"prometheus.Prometheus.port must be a number from 1 to {_MAX_PORT}. Received: {port!r}.")
        if textfile_directory is not None and not os.path.isdir(textfile_directory):
            raise UserError(
                f"prometheus.Prometheus.textfile_directory must be a directory that exists: the one that node_exporter "
                f"got as --collector.textfile.directory. Received: {textfile_directory!r}."
            )
        self._port = port
        self._address = address
        self._directory = textfile_directory
        self._textfile: str | None = None
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def open(self, run: RunFacts) -> None:
        import prometheus_client

        price = run.price_per_device_hour if run.is_chief else None  # the chief's series tell what the whole run costs
        self._dollars_per_second = run.num_replicas * (price or 0.0) / 3600
        self._seconds: Mapping[str, float] = {}
        self._step: int | None = None
        self._has_ended = False
        self._stored_at: float | None = None
        self._registry = prometheus_client.CollectorRegistry()
        self._labels = {"job_id": run.run_id, "worker": str(run.worker)}
        self._metrics = {name: self._series(metric) for name, metric in METRICS.items()}
        for name, (level, _) in EVENTS.items():  # Prometheus sees no growth in what begins with 1
            self._metrics["events_total"].labels(**self._labels, event=name, level=level)
        if self._directory is not None:
            self._textfile = os.path.join(self._directory, f"tfdist-{run.run_id}-{run.worker}.prom")
        if self._port is not None:
            port = self._port + run.worker
            try:
                self._server = prometheus_client.start_http_server(port, self._address, self._registry)
                limit_connections(self._server[0])
            except (OSError, OverflowError) as error:
                raise UserError(
                    f"Prometheus's endpoint of worker {run.worker} cannot listen on {self._address}:{port}: {error}. "
                    "Give another prometheus.Prometheus.port (worker k listens on port + k), or address."
                ) from error

    def event(self, event: Event) -> None:
        self._add("events_total", 1, event=event.name, level=event.level)
        if event.name == "checkpoint_saved":
            moment = event.time.timestamp()
            self._add("checkpoint_size_mb", event.details["num_bytes"] / 1e6)
            self._add("checkpoint_write_seconds", event.details["write_seconds"])
            self._add("last_checkpoint_timestamp_seconds", moment)
            if self._stored_at is not None:
                self._add("checkpoint_interval_seconds", moment - self._stored_at)
            self._stored_at = moment
        elif event.name in ("run_finished", "run_paused", "preempted", "run_failed"):
            self._has_ended = True  # the next sample says how long it took
        elif event.name == "training_diverged":
            self._add("loss_is_finite", 0)

    def point(self, point: Point) -> None:
        for name, value in point.metrics.items():
            if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number):
                self._add("metric_value", value, split=point.split, name=name)
                if point.split == "train" and name == "loss":
                    self._add("training_loss", value)
                    self._add("loss_is_finite", math.isfinite(value))
        if point.learning_rate is not None:
            self._add("learning_rate", point.learning_rate)

    def sample(self, sample: Sample) -> None:
        total, before = sum(sample.seconds.values()), sum(self._seconds.values())
        for share, seconds in sample.seconds.items():
            self._add("time_seconds_total", max(0.0, seconds - self._seconds.get(share, 0.0)), share=share)
        self._seconds = sample.seconds
        if self._has_ended:
            self._add("training_duration_seconds", total)
            self._has_ended = False
        self._add("compute_share", sample.seconds.get("compute", 0.0) / total if total else 0.0)
        if self._dollars_per_second:
            self._add("cost_usd", max(0.0, total - before) * self._dollars_per_second)
        if sample.step is not None:
            self._add("training_steps", sample.step)
            if sample.step != self._step:
                self._add("last_step_timestamp_seconds", sample.time.timestamp())
            self._step = sample.step
        for name, value in sample.values.items():
            self._add(name, value)
        self._write()

    def close(self, status: str) -> None:
        self._write()
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
        if self._textfile is not None and status != FAILED:
            os.remove(self._textfile)

    def _write(self) -> None:
        import prometheus_client

        if self._textfile is not None:
            prometheus_client.write_to_textfile(self._textfile, self._registry)

    def _series(self, metric: Metric) -> Any:
        from prometheus_client import Counter, Gauge, Histogram

        named = metric.exposed_name, metric.meaning, (*self._labels, *metric.labels)
        if metric.kind == HISTOGRAM:
            return Histogram(*named, registry=self._registry, buckets=metric.buckets)
        return (Counter if metric.kind == COUNTER else Gauge)(*named, registry=self._registry)

    def _add(self, metric: str, value: float, /, **labels: str) -> None:
        """Takes a counter's growth, a histogram's observation or a gauge's value."""
        series: Any = self._metrics[metric].labels(**self._labels, **labels)
        act = {COUNTER: "inc", HISTOGRAM: "observe", GAUGE: "set"}[METRICS[metric].kind]
        getattr(series, act)(value)


def limit_connections(server: WSGIServer) -> None:
    """Has a server, which makes a thread for each connection, take some at once, and none that says nothing for long.

    Whoever reaches it could use up the files that this process may open, and a training needs some.
    """
    free = threading.BoundedSemaphore(MAX_CONNECTIONS)
    start_thread, answer = server.process_request, server.finish_request

    def process_request(request: Any, address: Any) -> None:
        if free.acquire(blocking=False):
            start_thread(request, address)
        else:
            server.shutdown_request(request)

    def finish_request(request: Any, address: Any) -> None:
        try:
            request.settimeout(IDLE_SECONDS)
            answer(request, address)
        except OSError:
            pass  # it said nothing, or has gone
        finally:
            free.release()

    changed: Any = server
    changed.process_request, changed.finish_request = process_request, finish_request
