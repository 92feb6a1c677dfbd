"""Takes the batches of a source from tf.data service: from processes that `python -m tfdist.data_service` started.

Invariant: the batches and their order are those of the source itself, whatever the number of services. Local batch t of
a worker is made by service t mod W, which builds the same pipeline from the same gin file and sends its share in
order; nothing but numbers goes to it. Several tf.data workers behind one dispatcher give no order, so each service is a
dispatcher with one worker.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.failures import noted, watch
from tfdist.data.opaque import StreamSource
from tfdist.data.pipeline import as_source, build_pipeline
from tfdist.data.source import Source
from tfdist.errors import EXIT_PEER_LOST, TfdistError, UserError
from tfdist.strategies.base import Topology

CONNECT_SECONDS = 20.0
OPENING_SECONDS = 600.0  # a service may have files to index, and a vocabulary to fit
LOST_SECONDS = 10.0
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
        awaited = turns.map(lambda turn: _told(lambda t: links[int(t)].ask(), turn))
        merged = tf.data.Dataset.choose_from_datasets(streams, awaited, stop_on_empty_dataset=True)
        return tf.data.Dataset.zip(turns, merged).map(
            lambda turn, flat: tf.nest.pack_sequence_as(spec, _after(lambda t: links[int(t)].got(), turn, flat))
        )

    def diagnose(self) -> TfdistError | None:
        """What a service said before its stream failed."""
        return next((error for link in self._links if (error := link.error) is not None), None)


class Link:
    """A service's share of a worker's batches.

    The connection on which it was asked for stays open: over it the service says what went wrong, and its end tells
    that the service is gone, of which tf.data service would say nothing and wait for ever.

    Raises:
      UserError: the service is not there, or refuses.
    """

    def __init__(self, address: str, asked: dict[str, Any]) -> None:
        self.address = address
        self._counts = collections.Counter[str]()
        self._said: list[TfdistError] = []
        self._host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((self._host, int(port)), CONNECT_SECONDS)
            self._socket.settimeout(OPENING_SECONDS)
            self._lines = self._socket.makefile("rwb")
            self._lines.write(json.dumps(asked).encode() + b"\n")
            self._lines.flush()
            answer = json.loads(self._lines.readline() or '{"error": "it ended; its output says why"}')
        except (OSError, ValueError) as error:
            raise UserError(
                f"The data service {address} cannot be reached: {error}. Start it with: {COMMAND} --port={port}"
            ) from error
        if "error" in answer:
            raise UserError(f"The data service {address} cannot serve this data: {answer['error']}")
        self._socket.settimeout(None)
        self._answer = answer
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

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

    def _listen(self) -> None:
        try:
            for line in self._lines:
                self._said.append(UserError(f"The data service {self.address}: {json.loads(line)['error']}"))
        except OSError:
            pass  # reset: it is gone
        self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """Ends the process once a batch has been wanted in vain for a while from a service that is gone.

        What was sent before may still be enough for the rest of the run.
        """
        since, last = time.monotonic(), -1
        while time.monotonic() - since < LOST_SECONDS:
            time.sleep(0.1)
            got = self._counts["got"]
            if got != last or self._counts["asked"] == got:
                since, last = time.monotonic(), got
        print(
            f"error: The data service {self.address} is gone, and training waits for its batches. Start it and this "
            "run again.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_PEER_LOST)  # the training is inside TensorFlow, which cannot be called back


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
