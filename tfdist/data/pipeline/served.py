"""Takes the batches of a source from tf.data service: from processes that `python -m tfdist.data_service` started.

Invariant: the batches and their order are those of the source itself, whatever the number of services. Local batch t of
a worker is made by service t mod W, which builds the same pipeline from the same gin file and sends its share in
order; no code goes to it. It makes them as long as the `Served` or the dataset that asked for them lives. Several
tf.data workers behind one dispatcher give no order, so each service is a dispatcher with one worker.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.order.batches import BatchPlan
from tfdist.data.pipeline import connections
from tfdist.data.pipeline.failures import noted, watch
from tfdist.data.pipeline.pipeline import as_source, build_pipeline
from tfdist.data.sources.source import Source
from tfdist.data.sources.user_dataset import StreamSource
from tfdist.errors import EXIT_PEER_LOST, TfdistError, UserError, is_whole_number
from tfdist.strategies.base import Topology
from tfdist.telemetry.json_text import from_json

CONNECT_SECONDS = 20.0
OPENING_SECONDS = 600.0  # a service may have files to index, and a vocabulary to fit
LOST_SECONDS = 10.0
MOST_ANSWER_BYTES = 1 << 16
READ_AHEAD = 4  # batches of each service on their way
COMMAND = "python -m tfdist.data_service --gin_file=…"
_LOG = logging.getLogger(__name__)


class Served(StreamSource):
    """The batches of `data`, made by other processes. In a gin file that the services are started with, too:

        TRAIN_DATA = @served.Served
        served.Served.data = @train/image_folder.ImageFolder
        served.Served.services = ['127.0.0.1:5050', '127.0.0.1:5051']

    Args:
      data: a data function or source, of any kind but a `tf.data.Dataset`; its files have the same paths everywhere.
      services: host:port of each.

    Raises:
      UserError: the data cannot be served, or an address is none.
    """

    def __init__(self, data: Callable[[], Any] | Source, *, services: Sequence[str]) -> None:
        self.source = data if isinstance(data, Source) else as_source(data() if callable(data) else data)
        if isinstance(self.source, StreamSource):
            raise UserError(
                "Served.data gives a tf.data.Dataset, whose examples cannot be shared out among services. Have your "
                "function end with .apply(tf.data.experimental.service.distribute(…)), or give one of tfdist's sources."
            )
        if isinstance(services, str) or not services or not all(map(_is_address, services)):
            raise UserError(
                f"Served.services is a list of addresses, such as ['127.0.0.1:5050']; received {services!r}."
            )
        self._services = tuple(services)
        self._fitted = ""
        self._links: list[Link] = []
        self.num_examples = self.source.num_examples
        self.structure = self.source.structure

    def prepare(self, directory: str) -> None:
        self._fitted = directory
        self.source.prepare(directory)

    def describe(self) -> list[str]:
        return [f"made by {len(self._services)} services: {', '.join(self._services)}", *self.source.describe()]

    def local_batches(self, plan: BatchPlan, topology: Topology, first_step: int) -> tf.data.Dataset:
        spec = build_pipeline(self.source, plan, topology, first_step=first_step).element_spec
        asked = {
            "plan": dataclasses.asdict(plan),
            "topology": dataclasses.asdict(topology),
            "first_step": first_step,
            "of": len(self._services),
            "fitted": os.path.abspath(self._fitted) if self._fitted and "://" not in self._fitted else self._fitted,
            "identity": self.source.identity(),
        }
        links = [Link(address, asked | {"turn": turn}) for turn, address in enumerate(self._services)]
        self._links += links
        watch(self)
        turns = tf.data.Dataset.range(tf.int64.max).map(lambda t: t % len(links))
        streams = [link.dataset(tuple(tf.nest.flatten(spec))) for link in links]
        # TensorFlow keeps what it calls for as long as the process lives, so that must hold no link.
        known = [weakref.ref(link) for link in links]
        awaited = turns.map(lambda turn: _told(lambda t: _call(known[int(t)], Link.ask), turn))
        merged = tf.data.Dataset.choose_from_datasets(streams, awaited, stop_on_empty_dataset=True)
        dataset = tf.data.Dataset.zip(turns, merged).map(
            lambda turn, flat: tf.nest.pack_sequence_as(
                spec, _after(lambda t: _call(known[int(t)], Link.got), turn, flat)
            )
        )
        dataset._tfdist_links = links  # they live as long as what is made of it, or this source
        return dataset

    def diagnose(self) -> TfdistError | None:
        """What a service said before its stream failed."""
        return next((error for link in self._links if (error := link.error) is not None), None)


class Link:
    """A service's share of a worker's batches.

    The connection on which it was asked for stays open: over it the service says what went wrong, and its end tells
    that the service is gone, of which tf.data service would say nothing and wait for ever. It ends with this object,
    and the service then lets its pipeline go.

    Raises:
      UserError: the service is not there, or refuses.
    """

    def __init__(self, address: str, asked: dict[str, Any]) -> None:
        self.address = address
        self._counts = collections.Counter[str]()
        self._said: list[TfdistError] = []
        self._host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((self._host, int(port)), CONNECT_SECONDS)
            connections.keep_alive(connection)
            connection.sendall(json.dumps(asked).encode() + b"\n")
            self._answer = _answered(connections.read_line(connection, OPENING_SECONDS, MOST_ANSWER_BYTES))
        except (OSError, ValueError, OverflowError) as error:
            raise UserError(
                f"The data service {address} cannot be reached: {error}. Start it with: {COMMAND} --port={port}. "
                "Where it runs, its output says why."
            ) from error
        if "error" in self._answer:
            connection.close()
            raise UserError(f"The data service {address} cannot serve this data: {self._answer['error']}")
        connection.settimeout(None)
        ended = threading.Event()
        threading.Thread(
            target=_listen, args=(address, connection, self._counts, self._said, ended), daemon=True
        ).start()
        weakref.finalize(self, _hang_up, connection, ended)

    @property
    def error(self) -> TfdistError | None:
        return self._said[0] if self._said else None

    def ask(self) -> None:
        """A batch is wanted from here now."""
        self._counts["asked"] += 1

    def got(self) -> None:
        """It came."""
        self._counts["got"] += 1

    def dataset(self, flat_spec: tuple[tf.TensorSpec, ...]) -> tf.data.Dataset:
        return tf.data.experimental.service.from_dataset_id(
            processing_mode=tf.data.experimental.service.ShardingPolicy.OFF,
            service=f"grpc://{self._host}:{self._answer['port']}",
            dataset_id=tf.constant(self._answer["dataset_id"]),
            element_spec=flat_spec,
            max_outstanding_requests=READ_AHEAD,
            data_transfer_protocol="grpc",
        )


def _call(known: weakref.ref[Link], method: Callable[[Link], None]) -> None:
    if (link := known()) is not None:
        method(link)


def _hang_up(connection: socket.socket, ended: threading.Event) -> None:
    ended.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _listen(
    address: str,
    connection: socket.socket,
    counts: collections.Counter[str],
    said: list[TfdistError],
    ended: threading.Event,
) -> None:
    """Hears the service until one of the two ends the connection. Holds no link, which would never end then."""
    with contextlib.closing(connection), connection.makefile("rb") as lines:
        try:
            while line := lines.readline(MOST_ANSWER_BYTES):
                said.append(UserError(f"The data service {address}: {_answered(line).get('error', 'no reason given')}"))
        except (OSError, ValueError):
            pass  # reset, or what answers is no service: it is gone
    _end_if_stuck(address, counts, ended)


def _end_if_stuck(address: str, counts: collections.Counter[str], ended: threading.Event) -> None:
    """Ends the process once a batch has been wanted in vain for a while from a service that is gone.

    What was sent before may still be enough for the rest of the run.
    """
    since, last = time.monotonic(), -1
    while time.monotonic() - since < LOST_SECONDS:
        if ended.wait(0.1):  # nobody wants its batches any more
            return
        got = counts["got"]
        if got != last or counts["asked"] == got:
            since, last = time.monotonic(), got
    print(
        f"error: The data service {address} is gone, and training waits for its batches. Start it and this run again.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_PEER_LOST)  # the training is inside TensorFlow, which cannot be called back


def _answered(line: bytes) -> dict[str, Any]:
    """What a service said; raises ValueError for what no service says."""
    answer = from_json(line)
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        return {"error": answer["error"]}
    port, number = (answer.get("port"), answer.get("dataset_id")) if isinstance(answer, dict) else (None, None)
    if not is_whole_number(port) or port > 65535 or not isinstance(number, str):
        raise ValueError("what answers there is no data service")
    return answer


def _told(function: Callable[[np.ndarray], None], turn: tf.Tensor) -> tf.Tensor:
    """`turn`, once `function` was called with it."""

    def call(t: np.ndarray) -> np.ndarray:
        function(t)
        return t

    return tf.ensure_shape(tf.numpy_function(noted(call), [turn], tf.int64), [])


def _after(function: Callable[[np.ndarray], None], turn: tf.Tensor, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    with tf.control_dependencies([_told(function, turn), *flat]):
        return [tf.identity(part) for part in flat]


def _is_address(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"[\w.-]+:\d{1,5}", text) is not None
