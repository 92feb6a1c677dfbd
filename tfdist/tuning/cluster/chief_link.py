"""A worker's connection to the chief of its sweep: one gRPC stream, opened anew when it breaks.

Invariant: what came of an earlier connection is never mistaken for something of the present one, and nothing that the
other side says counts before it has shown that it has the sweep's secret. It only carries messages; when to connect and
what to say is `remote_worker.py`'s.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from tfdist.tuning.cluster import handshake, wire

FAREWELL_SECONDS = 0.5  # for the last messages to arrive
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # the cluster is reached directly
    ("grpc.use_local_subchannel_pool", 1),  # else a new connection would wait for the pause of the last one
    ("grpc.max_receive_message_length", wire.MOST_BYTES),
]


class ChiefLink:
    """Not connected at first.

    Args:
      address: host:port of the chief.
      secret: which the chief has to have, too.
      wake: called, from another thread, whenever there is news.
    """

    def __init__(self, address: str, *, secret: bytes, wake: Callable[[], None]) -> None:
        self._address, self._secret, self._wake = address, secret, wake
        self._news: queue.SimpleQueue[tuple[_Connection, dict[str, Any] | str]] = queue.SimpleQueue()
        self._connection: _Connection | None = None

    def connect(self, message: Mapping[str, Any]) -> None:
        """Opens a connection, in the place of the last, and says this first; does not wait."""
        self.close()
        self._connection = _Connection(self._address, self._secret, self._tell)
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
    def __init__(self, address: str, secret: bytes, tell: Callable[[_Connection, dict[str, Any] | str], None]) -> None:
        self._secret, self._tell = secret, tell
        self._nonce = handshake.new_nonce()
        self._proof: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._outbound: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._call = self._channel.stream_stream(wire.METHOD)(self._requests())
        self._thread = threading.Thread(target=self._follow, name="tfdist-chief-link", daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        self._outbound.put(message)

    def close(self) -> None:
        self._end_requests()
        self._thread.join(FAREWELL_SECONDS)
        self._call.cancel()
        self._thread.join()
        self._channel.close()

    def _end_requests(self) -> None:
        self._proof.put(None)
        self._outbound.put(None)

    def _requests(self) -> Iterator[bytes]:
        """What is sent: nothing but the knock before the chief has proved itself."""
        yield wire.encode({"kind": wire.KNOCK, "version": wire.VERSION, "nonce": self._nonce})
        if (proof := self._proof.get()) is None:
            return
        yield wire.encode({"kind": wire.PROOF, "proof": proof})
        yield from map(wire.encode, iter(self._outbound.get, None))

    def _follow(self) -> None:
        reason = "the chief closed the connection"
        try:
            if (first := next(self._call, None)) is not None:
                self._meet(wire.decode(first, wire.CHALLENGE, wire.REFUSED))
            for data in self._call:
                self._tell(self, wire.decode(data))
        except wire.NoMessage as error:
            reason = f"what answers there sent no message of a sweep: {error}"
            self._call.cancel()
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call):
                reason = _why(error)
        self._end_requests()
        self._tell(self, reason)

    def _meet(self, message: dict[str, Any]) -> None:
        """Continues with a chief that has the secret; what has not is refused."""
        if message["kind"] == wire.REFUSED:
            self._tell(self, message)
            return
        nonces = {"worker_nonce": self._nonce, "chief_nonce": message["nonce"]}
        if handshake.is_proven(message["proof"], self._secret, handshake.CHIEF, **nonces):
            self._proof.put(handshake.prove(self._secret, handshake.WORKER, **nonces))
        else:
            self._tell(self, {"kind": wire.REFUSED, "message": wire.OTHER_SECRET})
            self._call.cancel()


def _why(error: grpc.Call) -> str:
    """What gRPC says, in few words."""
    details = error.details() or ""
    found = re.search(r"[Ff]ailed to connect to remote host: (.+)", details)
    return found[1] if found else f"{details} ({error.code().name})"
