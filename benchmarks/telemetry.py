"""What it costs to see a run.

A step of a few milliseconds with every sink ÷ one without, each training in a process of its own, in turn, and the
processor time of all that the sinks start ÷ the training's.

    python benchmarks/telemetry.py [--json=FILE] [--rounds=5]
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import keras
import numpy as np
import psutil
from measuring import Figure, choose_size, make_ratio, measure_part, report
from step import MEDIUM
from workloads import loss, metric

from tfdist.data.sources.arrays import ArraySource
from tfdist.experiment import train
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.telemetry.console.console import Console
from tfdist.telemetry.sinks.mlflow import MLflow
from tfdist.telemetry.sinks.opentelemetry import OpenTelemetry
from tfdist.telemetry.sinks.prometheus import Prometheus
from tfdist.telemetry.sinks.sink import Sink
from tfdist.telemetry.sinks.wandb import Wandb
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TrainSettings

NUM_EXAMPLES = choose_size(5, 50) * MEDIUM.num_examples  # an epoch of some seconds
WORKLOAD = dataclasses.replace(MEDIUM, num_examples=NUM_EXAMPLES)
EPOCHS, WARM_EPOCHS = choose_size(12, 6), 4


def measure(*, rounds: int) -> Iterator[list[Figure]]:
    found: dict[str, list[list[Figure]]] = {"none": [], "all": []}
    for _ in range(rounds):
        for which, figures in found.items():
            figures.append(measure_part("telemetry", "steps", which))
    with_all, without = ([step.ours for step, _ in found[which]] for which in ("all", "none"))
    sinks, training = ([getattr(beside, side) for _, beside in found["all"]] for side in ("ours", "peer"))
    yield [
        make_ratio("a step with every sink ÷ without", with_all, without, 1.01, unit="ms", at_most=True),
        make_ratio("what every sink computes ÷ the training", sinks, training, 0.01, unit="s of CPU", at_most=True),
    ]


class Clock(keras.callbacks.Callback):
    """Times the epochs, the first ones aside."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.computed: list[np.ndarray] = []

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if epoch >= WARM_EPOCHS:
            self.seconds.append(time.perf_counter() - self._began)
            self.computed.append(read_processor_times())


def steps(which: str) -> list[Figure]:
    """Milliseconds a step with "all" sinks or "none", and what is computed beside the training ÷ by it."""
    clock = Clock()
    opened: contextlib.AbstractContextManager[Sequence[Sink]] = contextlib.nullcontext([])
    if which == "all":
        opened = open_sinks()
    with opened as sinks:
        step = statistics.median(_train(sinks, clock))
    beside, training = (clock.computed[-1] - clock.computed[0]).tolist()
    return [
        Figure(which, step, None, (step, step), step, step, "ms"),
        make_ratio("beside the training", [beside], [training], 0.01, unit="s of CPU", at_most=True),
    ]


def read_processor_times() -> np.ndarray:
    """Seconds of processor time: of Python's threads but the main one with child processes, and of the rest."""
    process = psutil.Process()
    seconds = {each.id: each.user_time + each.system_time for each in process.threads()}
    children = sum(sum(child.cpu_times()[:2]) for child in process.children(recursive=True))
    threads = [each.native_id for each in threading.enumerate() if each is not threading.main_thread()]
    beside = sum(seconds.pop(thread, 0.0) for thread in threads if thread is not None)
    return np.array([beside + children, sum(seconds.values())])


def _train(sinks: Sequence[Sink], clock: Clock) -> list[float]:
    """Milliseconds a step, by epoch."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        settings = TrainSettings(
            model=WORKLOAD.build_model,
            train_data=lambda: ArraySource(WORKLOAD.arrays()),
            optimizer=keras.optimizers.Adam,
            task=Supervised(loss=loss(), metrics=[metric]),
            strategy=OneDevice(),
            global_batch_size=WORKLOAD.global_batch_size,
            epochs=EPOCHS,
            checkpoint="off",
            xla="off",
            callbacks=[clock],
            sinks=sinks,
        )
        result = train(settings, Request(run_dir=f"{scratch}/run", console=lambda is_chief: Console()))
    assert result is not None
    return [1e3 * seconds / result.steps_per_epoch for seconds in clock.seconds]


@contextlib.contextmanager
def open_sinks() -> Iterator[Sequence[Sink]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch, _serve_collector() as endpoint:
        os.environ["WANDB_DIR"] = scratch
        os.chdir(scratch)  # where MLflow lays down its artifacts
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
def _serve_collector() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Accepts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


if __name__ == "__main__":
    report(__doc__, measure, numbers={"rounds": choose_size(5, 1)})
