"""Where the workers of a sweep reach its chief: one gRPC stream each, served by a thread of its own.

Invariant: it listens at the address that was asked for and nowhere else, alone. Nothing that is said counts before the
other side has shown that it has the sweep's secret, and what is no message ends its own connection alone. It only
carries messages: what they say is `remote_places.py`'s, on the chief's thread, which finds each with the time at which
it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import grpc
import grpc.aio

from tfdist.errors import UserError
from tfdist.strategies.cluster import hello
from tfdist.strategies.cluster.tf_config import split_address
from tfdist.tuning.cluster import handshake, wire

FAREWELL_SECONDS = 0.8  # for the last messages to arrive
HANDSHAKE_SECONDS = 10.0
MOST_CONNECTIONS = 4096
MOST_REFUSALS_TOLD = 20
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # else a second chief could listen at the same address
    ("grpc.max_receive_message_length", wire.MOST_BYTES),
]
_log = logging.getLogger(__name__)


_OTHER_VERSION = "The chief of this sweep runs another version of tfdist. Install the same on every machine."


@dataclasses.dataclass(frozen=True)
class News:
    """Something from a worker: a message; None: its connection has ended. `at` is of time.monotonic()."""

    session: int
    message: dict[str, Any] | None
    at: float


class ChiefServer:
    """Listens from the moment that it exists.

    Args:
      address: host:port.
      source: what the user set to ask for it.
      secret: which workers have to have, too.
      wake: called, from another thread, whenever there is news.

    Raises:
      UserError: nobody can listen there.
    """

    def __init__(self, address: str, *, source: str, secret: bytes, wake: Callable[[], None]) -> None:
        _check_free(address, source)
        self._address, self._secret, self._wake = address, secret, wake
        self._num_refused = 0
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._outbound: dict[int, asyncio.Queue[Mapping[str, Any] | None]] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._is_up = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tfdist-chief-server", daemon=True)
        self._thread.start()
        self._is_up.wait()
        if self._failure is not None:
            raise _cannot_listen(address, source, self._failure) from self._failure

    def take(self) -> Iterator[News]:
        """All that has come since."""
        while not self._news.empty():
            yield self._news.get()

    def send(self, session: int, message: Mapping[str, Any] | None) -> None:
        """Sends a message, if the worker is still connected; None ends the connection."""
        self._call(self._put, session, message)

    def close(self) -> None:
        """Ends all connections, once what was sent has gone out."""
        self._call(self._ending.set)
        self._thread.join()

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _put(self, session: int, message: Mapping[str, Any] | None) -> None:
        if session in self._outbound:
            self._outbound[session].put_nowait(message)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # `__init__` tells it
            self._failure = error
        finally:
            self._is_up.set()
            self._loop.close()

    async def _serve(self) -> None:
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MOST_CONNECTIONS)
        server.add_generic_rpc_handlers((_Handler(self._session),))
        server.add_insecure_port(self._address)
        await server.start()
        self._is_up.set()
        await self._ending.wait()
        for session in self._outbound:
            self._put(session, None)
        await server.stop(FAREWELL_SECONDS)

    async def _session(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._admit(requests, context)
        except _Refusal as refusal:
            self._note_refusal(context.peer(), str(refusal))
            await context.write(wire.encode({"kind": wire.REFUSED, "message": str(refusal)}))
            return
        except (TimeoutError, StopAsyncIteration):
            return
        session = next(self._numbers)
        outbound = self._outbound[session] = asyncio.Queue()
        reading = asyncio.create_task(self._read(session, requests, outbound, context.peer()))
        try:
            while (message := await outbound.get()) is not None:
                await context.write(wire.encode(message))
        finally:
            reading.cancel()
            del self._outbound[session]
            self._tell(session, None)

    async def _admit(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Lets in who has the secret; raises _Refusal for everybody else."""
        knock = _decoded(await anext(requests), wire.KNOCK)
        if knock["version"] != wire.VERSION:
            raise _Refusal(_OTHER_VERSION)
        nonces = {"worker_nonce": knock["nonce"], "chief_nonce": handshake.new_nonce()}
        proof = handshake.prove(self._secret, handshake.CHIEF, **nonces)
        challenge = {"kind": wire.CHALLENGE, "nonce": nonces["chief_nonce"], "proof": proof}
        await context.write(wire.encode(challenge))
        answer = _decoded(await anext(requests), wire.PROOF)
        if not handshake.is_proven(answer["proof"], self._secret, handshake.WORKER, **nonces):
            raise _Refusal(wire.OTHER_SECRET)

    def _note_refusal(self, peer: str, why: str) -> None:
        self._num_refused += 1
        if self._num_refused <= MOST_REFUSALS_TOLD:
            more = " Further refusals are not logged." if self._num_refused == MOST_REFUSALS_TOLD else ""
            _log.warning("The chief of the sweep refused a connection from %s: %s%s", peer, why, more)

    async def _read(
        self,
        session: int,
        requests: AsyncIterator[bytes],
        outbound: asyncio.Queue[Mapping[str, Any] | None],
        peer: str,
    ) -> None:
        try:
            async for data in requests:
                self._tell(session, _decoded(data))
        except _Refusal as refusal:
            self._note_refusal(peer, str(refusal))
            outbound.put_nowait({"kind": wire.REFUSED, "message": str(refusal)})
        finally:
            outbound.put_nowait(None)

    def _tell(self, session: int, message: dict[str, Any] | None) -> None:
        self._news.put(News(session, message, time.monotonic()))
        self._wake()


class _Refusal(Exception):
    """Why a connection ends; its text is for the other side."""


def _decoded(data: bytes, *kinds: str) -> dict[str, Any]:
    try:
        return wire.decode(data, *kinds)
    except wire.NoMessage as error:
        hint = f" {_OTHER_VERSION}" if wire.KNOCK in kinds else ""
        raise _Refusal(f"What it sent is no message of a sweep: {error}.{hint}") from error


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, session: Callable[..., Any]) -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(session)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handler if details.method == wire.METHOD else None


def _check_free(address: str, source: str) -> None:
    """Finds out what gRPC does not say: why nobody can listen at an address."""
    try:
        for each in hello.listen(*split_address(address)):
            each.close()
    except OSError as error:
        raise _cannot_listen(address, source, error) from error


def _cannot_listen(address: str, source: str, error: Exception) -> UserError:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, socket.gaierror):
        why = "the name does not resolve. Give the address of this machine."
    elif number == errno.EADDRNOTAVAIL:
        why = (
            "it is no address of this machine. Give one of its own, or set KERASTUNER_ORACLE_IP=0.0.0.0 on the chief "
            "alone to listen on all of them."
        )
    elif number == errno.EACCES:
        why = "this port needs more rights. Give one above 1023."
    elif number == errno.EADDRINUSE or isinstance(error, RuntimeError):
        why = (
            "the address is already in use. Is another chief, or another program, still there? End it, or give another "
            "port on every machine."
        )
    else:
        why = f"{error}."
    return UserError(f"The chief of the sweep cannot listen at {address} ({source}): {why}")
