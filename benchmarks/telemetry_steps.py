"""Trainings in which telemetry.py turns sinks on and off: steps of a few milliseconds."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
from measuring import Figure, ratio
from step_parts import MEDIUM
from workloads import loss, metric

from tfdist.data.sources.arrays import ArraySource
from tfdist.experiment import train
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.telemetry.console.console import NullConsole
from tfdist.telemetry.facts import Point, Sample
from tfdist.telemetry.sinks.mlflow import MLflow
from tfdist.telemetry.sinks.opentelemetry import OpenTelemetry
from tfdist.telemetry.sinks.prometheus import Prometheus
from tfdist.telemetry.sinks.sink import Sink
from tfdist.telemetry.sinks.wandb import Wandb
from tfdist.training.run.run import Request
from tfdist.training.run.settings import TrainSettings

WORKLOAD = dataclasses.replace(MEDIUM, num_examples=5 * MEDIUM.num_examples)  # an epoch of some seconds
BLOCK, WARM_BLOCKS = 2, 2  # epochs that are alike: the first one of a block still has to do with the facts before it


class Switch(keras.callbacks.Callback):
    """Turns sinks on and off, a block of epochs each, and times the last epoch of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.is_off = threading.Event()
        self.seconds: dict[bool, list[float]] = {True: [], False: []}  # by whether they are off

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        block, place = divmod(epoch, BLOCK)
        if place == 0:
            (self.is_off.clear if block % 2 else self.is_off.set)()
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        block, place = divmod(epoch, BLOCK)
        if place == BLOCK - 1 and block >= WARM_BLOCKS:
            self.seconds[self.is_off.is_set()].append(time.perf_counter() - self._began)


class Switched(Sink):
    """A sink that gets facts while it is on."""

    def __init__(self, sink: Sink, switch: Switch) -> None:
        self.open, self.close = sink.open, sink.close  # type: ignore[method-assign]
        for name in ("event", "point", "sample", "phase"):
            setattr(self, name, self._while_on(getattr(sink, name), switch))

    @staticmethod
    def _while_on(take: Callable[[Any], None], switch: Switch) -> Callable[[Any], None]:
        return lambda fact: None if switch.is_off.is_set() else take(fact)


class Hangs(Sink):
    """Does not return from a point or a sample while it is on."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def point(self, point: Point) -> None:
        self._switch.is_off.wait()

    def sample(self, sample: Sample) -> None:
        self._switch.is_off.wait()


def steps(which: str, rounds: str) -> list[Figure]:
    """A step with sinks, "all" or one that "hangs", ÷ one without, in turn in one training."""
    switch = Switch()
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch, _sinks(which, switch, scratch) as sinks:
        settings = TrainSettings(
            model=WORKLOAD.build_model,
            train_data=lambda: ArraySource(WORKLOAD.arrays()),
            optimizer=keras.optimizers.Adam,
            task=Supervised(loss=loss(), metrics=[metric]),
            strategy=OneDevice(),
            global_batch_size=WORKLOAD.global_batch_size,
            epochs=BLOCK * (WARM_BLOCKS + 2 * int(rounds)),
            checkpoint="off",
            xla="off",
            callbacks=[switch],
            sinks=sinks,
        )
        result = train(settings, Request(run_dir=f"{scratch}/run", console=lambda is_chief: NullConsole()))
    assert result is not None
    on, off = (
        [1e3 * seconds / result.steps_per_epoch for seconds in switch.seconds[is_off]] for is_off in (False, True)
    )
    name = {"all": "a step with every sink ÷ without", "hangs": "a step with a sink that hangs ÷ without"}[which]
    return [ratio(name, on, off, 1.01, unit="ms", at_most=True)]


@contextlib.contextmanager
def _sinks(which: str, switch: Switch, scratch: str) -> Iterator[Sequence[Sink]]:
    if which == "hangs":
        yield [Hangs(switch)]
        return
    os.environ["WANDB_DIR"] = scratch
    os.chdir(scratch)  # where MLflow lays down its artifacts
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with _collector() as endpoint:
        every = (
            Prometheus(port=port, textfile_directory=scratch),
            OpenTelemetry(endpoint=endpoint),
            MLflow(tracking_uri=f"sqlite:///{Path(scratch, 'mlflow.db')}"),
            Wandb(mode="offline"),
        )
        yield [Switched(sink, switch) for sink in every]


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
