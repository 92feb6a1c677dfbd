"""The other end of `served.py`: makes a share of a training worker's batches and sends it through tf.data service.

Invariant: takes no code from anyone: a request is numbers, the name of the directory with what the run has fitted, of
which a copy is read, and the data is what this process's own gin file says. A connection that says nothing, something
else or too much ends alone. Each request gets a pipeline of its own, which lives as long as the connection that asked.

TensorFlow's own two ports (dispatcher and worker of tf.data service) are no part of this: docs/security.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.order.batches import BatchPlan
from tfdist.data.pipeline import connections
from tfdist.data.pipeline.failures import noted
from tfdist.data.pipeline.pipeline import build_pipeline
from tfdist.data.pipeline.served import Served
from tfdist.errors import TfdistError, UserError, is_whole_number
from tfdist.storage import files
from tfdist.strategies.base import Topology
from tfdist.telemetry.json_text import from_json

FORGET_MILLISECONDS = 30_000
REQUEST_SECONDS = 10.0  # for a request to come, once connected
MOST_CONNECTIONS = 4096
MOST_REQUEST_BYTES = 1 << 16
MOST_FITTED_FILES, MOST_FITTED_BYTES = 64, 256 << 20
_LOG = logging.getLogger(__name__)


class DataServer:
    """A dispatcher of tf.data service with its one worker, and the port on which pipelines are asked for.

    Args:
      data: the data function of the training; gives a `Served`.
      host: by which training workers reach this machine; what asks for pipelines is heard on this address alone.
      port: 0 takes a free one.
    """

    def __init__(self, data: Callable[[], Any], *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._data = data
        try:
            self._listener = socket.create_server((host, port), backlog=MOST_CONNECTIONS)
        except OSError as error:
            raise UserError(f"Port {port} of {host} cannot be listened on: {error}. Give another --port.") from error
        self._asked: queue.SimpleQueue[tuple[dict[str, Any], socket.socket]] = queue.SimpleQueue()
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        service = tf.data.experimental.service
        self._dispatcher = service.DispatchServer(
            service.DispatcherConfig(
                job_gc_check_interval_ms=FORGET_MILLISECONDS // 3, job_gc_timeout_ms=FORGET_MILLISECONDS
            )
        )
        self._target = self._dispatcher.target
        dispatcher_port = self._target.rpartition(":")[2]
        self._worker = service.WorkerServer(
            service.WorkerConfig(dispatcher_address=f"localhost:{dispatcher_port}", worker_address=f"{host}:%port%")
        )

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def serve(self) -> None:
        """Answers requests, for ever. In the thread that made the configuration current, as data functions need it."""
        threading.Thread(target=self._accept, name="tfdist-data-accept", daemon=True).start()
        while True:
            asked, connection = self._asked.get()
            try:
                answer = self._open(asked, connection)
                _LOG.info("serves %s: turn %d of %d", _peer(connection), asked["turn"], asked["of"])
            except TfdistError as error:
                answer = {"error": str(error)}
            except Exception as error:  # of this request; the next may be sound
                _LOG.exception("A request of %s could not be served", _peer(connection))
                answer = {"error": f"{type(error).__name__}: {error}"}
            _say(connection, answer)
            if "error" in answer:
                self._end(connection)

    def _accept(self) -> None:
        """Hears each connection on a thread of its own, so that none waits for another to speak."""
        while True:
            self._free.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                _LOG.warning("A connection was not accepted: %s", error)
                self._free.release()
                time.sleep(0.1)  # such as without a free descriptor
                continue
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        try:
            connections.keep_alive(connection)
            asked = _checked(connections.read_line(connection, REQUEST_SECONDS, MOST_REQUEST_BYTES))
        except ValueError as error:
            _LOG.warning("%s sent no request: %s", _peer(connection), error)
            _say(connection, {"error": f"no request that it understands ({error}); is it of the same version?"})
            self._end(connection)
        except OSError as error:
            _LOG.warning("A connection ended before it asked for anything: %s", error)
            self._end(connection)
        else:
            self._asked.put((asked, connection))

    def _end(self, connection: socket.socket) -> None:
        connection.close()
        self._free.release()

    def _until_gone(self, connection: socket.socket, held: list[Any]) -> None:
        """Lets the pipeline go when whoever asked for it is gone; nothing more is to be said by it."""
        with contextlib.suppress(OSError):
            connection.settimeout(None)
            connection.recv(1)
        held.clear()
        self._end(connection)

    def _open(self, asked: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        served = self._data()
        if not isinstance(served, Served):
            raise UserError("train.train_data of the service's gin file is no served.Served.")
        source = served.source
        if asked["fitted"]:
            with _copied(asked["fitted"]) as fitted:
                source.prepare(fitted)
        if source.identity() != asked["identity"]:
            raise UserError(
                "it reads other data. Start it with the same gin files and parameters as the training, where the "
                "files have the same paths, sizes and times of change."
            )
        pipeline = build_pipeline(
            source,
            BatchPlan(**asked["plan"]),
            Topology(**asked["topology"]),
            first_step=asked["first_step"],
            turn=asked["turn"],
            of=asked["of"],
        )
        held: list[Any] = [iter(pipeline)]
        lock = threading.Lock()

        def batch() -> list[np.ndarray]:
            with lock:
                try:
                    return [part.numpy() for part in tf.nest.flatten(next(held[0]))]
                except (tf.errors.OpError, IndexError) as error:
                    _say(connection, {"error": _why(error, source)})
                    raise

        specs = tf.nest.flatten(pipeline.element_spec)
        safe = noted(batch)

        def flat(_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            parts = tf.numpy_function(safe, [], [spec.dtype for spec in specs])
            return tuple(tf.ensure_shape(part, spec.shape) for part, spec in zip(parts, specs, strict=True))

        dataset = tf.data.Dataset.range(tf.int64.max).map(flat)
        number = tf.data.experimental.service.register_dataset(self._target, dataset, compression=None)
        threading.Thread(target=self._until_gone, args=(connection, held), daemon=True).start()
        return {"port": int(self._target.rpartition(":")[2]), "dataset_id": number.numpy().decode()}


def _checked(line: bytes) -> dict[str, Any]:
    """A request; raises ValueError for anything else."""
    asked = from_json(line)
    if not isinstance(asked, dict):
        raise ValueError("it is no object")
    for name, kind in (("plan", dict), ("topology", dict), ("fitted", str), ("identity", str)):
        if not isinstance(asked.get(name), kind):
            raise ValueError(f"its {name} is missing, or not what it has to be")
    for name in ("first_step", "turn", "of"):
        if not is_whole_number(asked.get(name), least=0):
            raise ValueError(f"its {name} is missing, or no whole number")
    for name, made in (("plan", BatchPlan), ("topology", Topology)):
        known = {field.name for field in dataclasses.fields(made)}
        values = asked[name].values()
        if asked[name].keys() != known or not all(value is None or isinstance(value, int) for value in values):
            raise ValueError(f"its {name} is not one of this version")
    if not asked["turn"] < asked["of"]:
        raise ValueError("its turn is none")
    return asked


@contextlib.contextmanager
def _copied(directory: str) -> Iterator[str]:
    """A copy of the files in a run's directory of what was fitted; what is written there is written to the copy.

    Raises UserError where it holds more than what sources leave there.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-fitted-") as copy:
        names, num_bytes = files.list_names(directory), 0
        for name in names:
            num_bytes += files.stat(files.join(directory, name)).num_bytes
            if len(names) > MOST_FITTED_FILES or num_bytes > MOST_FITTED_BYTES:
                raise UserError(f"{directory} is no directory of what a run has fitted: it holds too much.")
            files.write_atomic(os.path.join(copy, name), files.read(files.join(directory, name)))
        yield copy


def _why(error: Exception, source: Any) -> str:
    from tfdist.data.pipeline import failures

    told = failures.take() or failures.explained(error)
    return str(told or error)


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        _LOG.info("whoever asked is gone")


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "whoever asked"
