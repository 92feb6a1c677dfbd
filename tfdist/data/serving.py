"""The other end of `served.py`: makes a share of a training worker's batches and sends it through tf.data service.

Invariant: takes no code from anyone: a request is numbers, and the data is what this process's own gin file says. Each
request gets a pipeline of its own, which lives as long as the connection that asked. Called by tfdist.data_service.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.failures import noted
from tfdist.data.pipeline import build_pipeline
from tfdist.data.served import Served
from tfdist.errors import TfdistError, UserError
from tfdist.strategies.base import Topology

FORGET_MILLISECONDS = 30_000
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
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise UserError(f"Port {port} of {host} cannot be listened on: {error}. Give another --port.") from error
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
        while True:
            connection, address = self._listener.accept()
            lines = connection.makefile("rwb")
            try:
                asked = json.loads(lines.readline())
                answer = self._open(asked, lines)
                _LOG.info("serves %s: turn %d of %d", address[0], asked["turn"], asked["of"])
            except TfdistError as error:
                answer = {"error": str(error)}
            except (ValueError, KeyError, TypeError) as error:
                answer = {"error": f"no request that it understands ({error!r}); is it of the same version?"}
            _say(lines, answer)

    def _open(self, asked: dict[str, Any], lines: Any) -> dict[str, Any]:
        served = self._data()
        if not isinstance(served, Served):
            raise UserError("train.train_data of the service's gin file is no served.Served.")
        source = served.source
        if asked["fitted"]:
            source.prepare(asked["fitted"])
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
        held = [iter(pipeline)]
        lock = threading.Lock()

        def batch() -> list[np.ndarray]:
            with lock:
                try:
                    return [part.numpy() for part in tf.nest.flatten(next(held[0]))]
                except (tf.errors.OpError, IndexError) as error:
                    _say(lines, {"error": _why(error, source)})
                    raise

        specs = tf.nest.flatten(pipeline.element_spec)
        safe = noted(batch)

        def flat(_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            parts = tf.numpy_function(safe, [], [spec.dtype for spec in specs])
            return tuple(tf.ensure_shape(part, spec.shape) for part, spec in zip(parts, specs, strict=True))

        dataset = tf.data.Dataset.range(tf.int64.max).map(flat)
        number = tf.data.experimental.service.register_dataset(self._target, dataset, compression=None)
        threading.Thread(target=_until_gone, args=(lines, held), daemon=True).start()
        return {"port": int(self._target.rpartition(":")[2]), "dataset_id": number.numpy().decode()}


def _until_gone(lines: Any, held: list[Any]) -> None:
    """Lets the pipeline go when whoever asked for it is gone."""
    with contextlib.suppress(OSError):
        lines.read()
    held.clear()


def _why(error: Exception, source: Any) -> str:
    from tfdist.data import failures

    told = failures.take() or failures.explained(error)
    return str(told or error)


def _say(lines: Any, message: dict[str, Any]) -> None:
    try:
        lines.write(json.dumps(message).encode() + b"\n")
        lines.flush()
    except OSError:
        _LOG.info("whoever asked is gone")
