"""Runs as they are, watched by Prometheus and an OpenTelemetry collector."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from crashes.runs import environment
from equivalence.cases import digits
from monitoring_support import otlp_receiver
from prometheus_server import Server, needs_prometheus, scraping
from support import REPOSITORY, free_ports, run_python, wait_until
from training.trainings import run

from tfdist.errors import DivergedError
from tfdist.telemetry.sinks.prometheus import Prometheus
from tfdist.telemetry.stream import CLOSE_SECONDS

pytestmark = pytest.mark.slow


def digits_with_nan() -> tf.data.Dataset:
    images, labels = digits()
    images[200, 30] = np.nan
    return tf.data.Dataset.from_tensor_slices((images, labels))


class Lingering(Prometheus):
    """Shows a run's end until an alert fires."""

    def __init__(self, port: int, prometheus: Server) -> None:
        super().__init__(port=port)
        self._prometheus = prometheus

    def close(self, status: str) -> None:
        wait_until(lambda: "TfdistLossNotFinite" in self._prometheus.firing(), seconds=CLOSE_SECONDS)
        super().close(status)


@needs_prometheus
def test_prometheus_scrapes_a_run_that_diverges_and_the_alert_fires(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with scraping(tmp_path, port) as prometheus:
        run_dir = tmp_path / "run"
        sinks = [Lingering(port, prometheus)]
        trained = run(run_dir, may_fail=True, train_data=digits_with_nan, shuffle=False, sinks=sinks)
        assert isinstance(trained.error, DivergedError)
        assert not trained.events("sink_dropped")
        ((labels, seconds),) = prometheus.asked("sum by (job_id) (last_over_time(tfdist_time_seconds_total[1h]))")
        assert labels["job_id"] == (run_dir / "telemetry" / "run_id").read_text().strip()
        assert seconds > 0
        told = prometheus.asked('last_over_time(tfdist_events_total{event="training_diverged", level="error"}[1h])')
        assert [count for _, count in told] == [1]


def test_a_launched_run_that_is_killed_and_restarted_is_one_trace_of_both_workers(tmp_path: Path) -> None:
    faults, run_dir = tmp_path / "faults", tmp_path / "run"
    faults.mkdir()
    (faults / "faults.json").write_text(json.dumps([("killed", 1, 12)]))
    with otlp_receiver() as receiver:
        params = [
            "from tfdist.telemetry.sinks import opentelemetry",
            "train.sinks = [@opentelemetry.OpenTelemetry()]",
            f"opentelemetry.OpenTelemetry.endpoint = {receiver.url!r}",
            "train.epochs = 3",
        ]
        run_python(
            [
                *("-m", "tfdist.launch", "--workers=2", "--max_restarts=1", "--backoff_seconds=0.1", "--"),
                *("--gin_file=tests/launch/faulty.gin", "--gin_file=configs/strategies/multi_worker.gin"),
                *(f"--gin_param={param}" for param in params),
                f"--run_dir={run_dir}",
            ],
            env=environment() | {"TFDIST_TEST_FAULTS": str(faults)},
            cwd=REPOSITORY,
        ).check()
    spans = receiver.spans
    assert {span["trace"] for span in spans} == {(run_dir / "telemetry" / "run_id").read_text().strip()}

    def of(start: int, worker: int) -> list[str]:
        return [span["name"] for span in spans if (span["tfdist.start"], span["tfdist.worker"]) == (start, worker)]

    starts = {span["id"] for span in spans if span["name"] == "start"}
    assert len(starts) == 4
    assert {span["parent"] for span in spans if span["name"] != "start"} == starts
    assert {"import", "connect"} <= set(of(0, 1))  # of the killed one, without its last seconds
    for start, worker in ((0, 0), (1, 0), (1, 1)):
        assert {"import", "connect", "data", "build", "evaluate", "checkpoint", "train"} <= set(of(start, worker))
    assert {"restore", "resumed", "epoch", "checkpoint_saved"} <= set(of(1, 0))
    ends = {span["tfdist.start"]: span["tfdist.status"] for span in spans if span["name"] == "train"}
    assert ends == {0: "failed", 1: "done"}
