"""A worker's connection to the chief of its sweep: one gRPC stream, opened anew when it breaks.

Invariant: what came of an earlier connection is never mistaken for something of the present one. It only carries
messages; when to connect and what to say is `remote_worker.py`'s.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from tfdist.tuning import wire

FAREWELL_SECONDS = 0.5  # for the last messages to arrive
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # the cluster is reached directly
    ("grpc.use_local_subchannel_pool", 1),  # else a new connection would wait for the pause of the last one
]


class ChiefLink:
    """Not connected at first.

    Args:
      address: host:port of the chief.
      wake: called, from another thread, whenever there is news.
    """

    def __init__(self, address: str, *, wake: Callable[[], None]) -> None:
        self._address, self._wake = address, wake
        self._news: queue.SimpleQueue[tuple[_Connection, dict[str, Any] | str]] = queue.SimpleQueue()
        self._connection: _Connection | None = None

    def connect(self, message: Mapping[str, Any]) -> None:
        """Opens a connection, in the place of the last, and says this first; does not wait."""
        self.close()
        self._connection = _Connection(self._address, self._tell)
        self._connection.send(message)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, if the connection lasts."""
        if self._connection is not None:
            self._connection.send(message)

    def take(self) -> Iterator[dict[str, Any] | str]:
        """Messages of the chief since; a text says why the connection has ended."""
        while not self._news.empty():
            connection, news = self._news.get()
            if connection is self._connection:
                yield news

    def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def _tell(self, connection: _Connection, news: dict[str, Any] | str) -> None:
        self._news.put((connection, news))
        self._wake()


class _Connection:
    def __init__(self, address: str, tell: Callable[[_Connection, dict[str, Any] | str], None]) -> None:
        self._tell = tell
        self._outbound: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        join = self._channel.stream_stream(
            wire.METHOD, request_serializer=wire.encode, response_deserializer=wire.decode
        )
        self._call = join(iter(self._outbound.get, None))
        self._thread = threading.Thread(target=self._follow, name="tfdist-chief-link", daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        self._outbound.put(message)

    def close(self) -> None:
        self._outbound.put(None)
        self._thread.join(FAREWELL_SECONDS)
        self._call.cancel()
        self._thread.join()
        self._channel.close()

    def _follow(self) -> None:
        reason = "the chief closed the connection"
        try:
            for message in self._call:
                self._tell(self, message)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call):
                reason = _why(error)
        self._outbound.put(None)
        self._tell(self, reason)


def _why(error: grpc.Call) -> str:
    """What gRPC says, in few words."""
    details = error.details() or ""
    found = re.search(r"[Ff]ailed to connect to remote host: (.+)", details)
    return found[1] if found else f"{details} ({error.code().name})"
