"""Trainings that telemetry.py compares: steps of about a millisecond, with sinks and without."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import keras
from measuring import Figure
from step_parts import MEDIUM
from workloads import loss, metric

from tfdist.data.sources.arrays import ArraySource
from tfdist.experiment import train
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.telemetry.console.console import NullConsole
from tfdist.telemetry.facts import Event, Point, Sample
from tfdist.telemetry.sinks.mlflow import MLflow
from tfdist.telemetry.sinks.opentelemetry import OpenTelemetry
from tfdist.telemetry.sinks.prometheus import Prometheus
from tfdist.telemetry.sinks.sink import Sink
from tfdist.telemetry.sinks.wandb import Wandb
from tfdist.training.run.run import Request
from tfdist.training.run.settings import TrainSettings

EPOCHS, WARM_EPOCHS = 40, 10


class Hangs(Sink):
    """Never returns from the first fact that it gets."""

    def event(self, event: Event) -> None:
        time.sleep(1e6)

    def point(self, point: Point) -> None:
        time.sleep(1e6)

    def sample(self, sample: Sample) -> None:
        time.sleep(1e6)


class Clock(keras.callbacks.Callback):
    """The seconds of the epochs after the first ones."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if epoch == WARM_EPOCHS - 1:
            self.began = time.perf_counter()
        if epoch == EPOCHS - 1:
            self.seconds = time.perf_counter() - self.began


def steps(which: str) -> list[Figure]:
    """Milliseconds a step with sinks: "none", "all" or one that "hangs"."""
    workload, clock = MEDIUM, Clock()
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch, _sinks(which, scratch) as sinks:
        settings = TrainSettings(
            model=workload.build_model,
            train_data=lambda: ArraySource(workload.arrays()),
            optimizer=keras.optimizers.Adam,
            task=Supervised(loss=loss(), metrics=[metric()]),
            strategy=OneDevice(),
            global_batch_size=workload.global_batch_size,
            epochs=EPOCHS,
            checkpoint="off",
            xla="off",
            callbacks=[clock],
            sinks=sinks,
        )
        result = train(settings, Request(run_dir=f"{scratch}/run", console=lambda is_chief: NullConsole()))
    assert result is not None
    step = 1e3 * clock.seconds / (result.steps_per_epoch * (EPOCHS - WARM_EPOCHS))
    return [Figure(which, step, None, (step, step), step, step, "ms")]


@contextlib.contextmanager
def _sinks(which: str, scratch: str) -> Iterator[Sequence[Sink]]:
    if which != "all":
        yield [Hangs()] if which == "hangs" else []
        return
    os.environ["WANDB_DIR"] = scratch
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with _collector() as endpoint:
        yield [
            Prometheus(port=port, textfile_directory=scratch),
            OpenTelemetry(endpoint=endpoint),
            MLflow(tracking_uri=f"sqlite:///{Path(scratch, 'mlflow.db')}"),
            Wandb(mode="offline"),
        ]


class _Accepts(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Accepts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
