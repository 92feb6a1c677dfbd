"""Waits until every worker of the cluster is there, before TensorFlow starts its own servers.

TensorFlow 2.21 waits an hour for a missing peer, in MultiWorkerMirroredStrategy's constructor, without a word and
deaf to SIGINT and SIGTERM. So each worker first listens at its own address, where it says who it is in one line of
JSON. Worker 0 connects to all others and stays connected: it tells them who is missing, and that all are there.

Invariant: when one worker returns, all were there at once, with the same cluster and each in its own place, and
worker 0 and each of them have reached each other.

Imports no TensorFlow.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from tfdist.errors import PeerLostError, UserError, build_user_error, shorten_list
from tfdist.strategies.cluster.tf_config import Cluster, split_address
from tfdist.telemetry.json_text import from_json

PROTOCOL = "tfdist-rendezvous-2"
ASK_SECONDS = 0.1  # between two attempts to reach a peer, in a cluster of up to 64
ANSWER_SECONDS = 5.0
MAX_ATTEMPTS = 256  # at once
MAX_LINE_BYTES = 1 << 20
MAX_NAMED = 8
BACKLOG = 4096  # as many peers may ask in one instant; the system has a limit of its own
BIND_PATIENCE_SECONDS = 2.0  # for a process that is just ending to free the port
FIRST_WORD_SECONDS = 3.0  # before saying for whom this worker waits
NEXT_WORD_SECONDS = 30.0


class AddressTakenError(UserError):
    """Another program listens at this worker's address."""

    error_id = "port-taken"


def rendezvous(
    cluster: Cluster, *, timeout_seconds: float, on_wait: Callable[[str], None] = lambda message: None
) -> None:
    """Returns when every worker of the cluster is there.

    Args:
      timeout_seconds: how long to wait for workers that do not answer.
      on_wait: is told for whom this worker waits, after some seconds and whenever that changes.

    Raises:
      UserError: this worker's port is taken, or a peer has another TF_CONFIG.
      PeerLostError: somebody did not come in time.
    """
    if cluster.num_workers > 1:
        asyncio.run(Meeting(cluster, timeout_seconds, on_wait).meet())


class Meeting:
    """One rendezvous; all its state belongs to one event loop."""

    def __init__(self, cluster: Cluster, timeout_seconds: float, on_wait: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.timeout_seconds = timeout_seconds
        self.on_wait = on_wait
        self.me = cluster.task_name(cluster.worker_index)
        asked = range(1, cluster.num_workers) if cluster.is_chief else [0]
        self.troubles = dict.fromkeys(asked, "not asked yet")  # of those that this worker waits for
        self.links: dict[int, asyncio.StreamWriter] = {}  # worker 0's, to all that are there
        self.missing: str | None = None  # what worker 0 says, while it is connected
        self.has_reached_chief = asyncio.Event()
        self.attempts = asyncio.Semaphore(MAX_ATTEMPTS)
        self.ask_seconds = ASK_SECONDS * max(1.0, cluster.num_workers / 64)

    async def meet(self) -> None:
        """Waits until all workers have been reached.

        Raises:
          PeerLostError: some were not, within the timeout.
          UserError: a peer does not fit.
        """
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        server = await self._listen()
        tasks = [asyncio.create_task(each) for each in (*map(self._reach, self.troubles), self._report_missing())]
        for task in tasks:
            task.add_done_callback(self._fail)
        try:
            async with asyncio.timeout(self.timeout_seconds):
                await self.over
        except TimeoutError:
            raise PeerLostError(
                f"{self.me} waited {self.timeout_seconds:g} s and gives up; missing: {self._list()}. Start all workers "
                "within that time of each other, and check that the addresses in TF_CONFIG can be reached from this "
                "machine."
            ) from None
        except UserError as error:
            self._send_to_all(failed=str(error))
            await asyncio.sleep(3 * self.ask_seconds)  # the peer that does not fit asks too and hears it
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            server.close()

    def _fail(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self.over.done():
            self.over.set_exception(error)

    async def _listen(self) -> asyncio.Server:
        """Listens at this worker's port: on loopback alone if the whole cluster is there, else on all interfaces.

        TensorFlow listens on all interfaces, and the given host may be a name that this machine itself resolves to
        something which peers cannot reach.
        """
        host, port = split_address(self.cluster.address)
        host = "127.0.0.1" if host == "localhost" else host  # a machine without IPv6 has no other
        interface = host if self.cluster.is_of_one_machine else None
        give_up = time.monotonic() + BIND_PATIENCE_SECONDS
        while True:
            try:
                return await asyncio.start_server(self._answer, interface, port, limit=MAX_LINE_BYTES, backlog=BACKLOG)
            except OSError as error:
                cannot = f"{self.me} cannot listen at its address {self.cluster.address}"
                if error.errno != errno.EADDRINUSE:
                    raise UserError(f"{cannot}: {error.strerror or error}. Give it another in TF_CONFIG.") from error
                if time.monotonic() >= give_up:
                    raise AddressTakenError(
                        f"{cannot}: port {port} of this machine is already in use. Is another run, or another process "
                        "with the same task.index, still there? End it, or give this task another port in every "
                        "worker's TF_CONFIG."
                    ) from error
                await asyncio.sleep(ASK_SECONDS)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Says who this worker is, and that it reaches worker 0; worker 0, if it has asked, then says the rest."""
        is_of_chief = False
        try:
            writer.write(encode(index=self.cluster.worker_index, workers=self.cluster.workers))
            if self.cluster.is_chief:
                return
            await self.has_reached_chief.wait()
            writer.write(b"\n")
            while line := await reader.readline():
                message, is_of_chief = decode(line), True
                self.missing = message.get("missing")
                if not self.over.done() and "failed" in message:
                    self.over.set_exception(build_user_error(message["failed"], error_id="cluster-mismatch"))
                elif not self.over.done() and "met" in message:
                    self.over.set_result(None)
        except (OSError, ValueError):
            pass  # a port scanner, or a peer that went away; peers ask again
        except asyncio.CancelledError:
            pass  # the meeting is over; asyncio would print a traceback for a cancelled handler
        finally:
            if is_of_chief:
                self.missing = None
            writer.close()

    async def _reach(self, index: int) -> None:
        """Connects to a worker, again and again; worker 0 stays connected, the others wait for it to connect."""
        while True:
            try:
                reader, writer = await self._connect(index)
                with contextlib.closing(writer):
                    if self.cluster.is_chief:
                        await self._follow(index, reader, writer)
                self.troubles[index] = "it has not reached this worker yet"
                self.has_reached_chief.set()
            except (OSError, ValueError) as error:
                self.troubles[index] = describe(error, split_address(self.cluster.workers[index])[0])
            await asyncio.sleep(self.ask_seconds)
            while self.missing is not None:
                await asyncio.sleep(self.ask_seconds)

    async def _connect(self, index: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a worker, which is who it should be."""
        address = self.cluster.workers[index]
        async with self.attempts, asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(*split_address(address), limit=MAX_LINE_BYTES)
            try:
                if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):
                    raise ConnectionRefusedError  # TCP met itself, which it can where nobody listens
                self._check(index, decode(await reader.readline()))
            except BaseException:
                writer.close()
                raise
        return reader, writer

    async def _follow(self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Counts a worker as there until its connection ends, which is an OSError."""
        self.troubles[index] = "it does not reach worker 0"
        if not await reader.readline():
            raise ConnectionResetError
        self.links[index] = writer
        del self.troubles[index]
        try:
            if self.troubles:
                writer.write(encode(missing=self._list()))
            elif not self.over.done():
                self._send_to_all(met=True)
                self.over.set_result(None)
            await reader.read()
            raise ConnectionResetError
        finally:
            del self.links[index]

    def _send_to_all(self, **message: Any) -> None:
        for writer in self.links.values():
            writer.write(encode(**message))

    def _check(self, index: int, message: dict[str, Any]) -> None:
        """Raises UserError where a worker's account of itself does not fit this one's cluster."""
        address, name = self.cluster.workers[index], self.cluster.task_name(index)
        if message["workers"] != list(self.cluster.workers):
            raise build_user_error(
                f"{self.me} and {name} have different clusters in TF_CONFIG. Give both the same, in the same order.\n"
                f"  {self.me}: {', '.join(self.cluster.workers)}\n"
                f"  {name} at {address}: {', '.join(map(str, message['workers']))}",
                error_id="cluster-mismatch",
            )
        if message["index"] != index:
            raise build_user_error(
                f"At {address}, the address of {name}, answers a process whose TF_CONFIG says that it is worker "
                f"{message['index']}. Set task.type and task.index of each process to its place in the cluster.",
                error_id="cluster-mismatch",
            )

    def _list(self) -> str:
        """The workers that hold up the meeting, and why."""
        if self.missing is not None:
            return self.missing
        task_name, addresses = self.cluster.task_name, self.cluster.workers
        late = [f"{task_name(i)} at {addresses[i]} ({self.troubles[i]})" for i in sorted(self.troubles)]
        return "; ".join(shorten_list(late, MAX_NAMED))

    async def _report_missing(self) -> None:
        """Says for whom this worker waits: after a moment, when that has changed for good, and now and then."""
        before, reported, reported_at, begun = self._list(), "", 0.0, time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            waiting_for, now = self._list(), time.monotonic()
            if waiting_for != before:
                self._send_to_all(missing=waiting_for)
            is_news = waiting_for not in (reported, "") and waiting_for == before
            if now - begun >= FIRST_WORD_SECONDS and (is_news or now - reported_at >= NEXT_WORD_SECONDS):
                self.on_wait(f"waiting for {waiting_for}")
                reported, reported_at = waiting_for, now
            before = waiting_for


def encode(**message: Any) -> bytes:
    """Encodes a message as a line of this protocol."""
    return json.dumps({"protocol": PROTOCOL, **message}).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Decodes what a worker says of itself, or worker 0 to the others.

    Raises:
      ConnectionResetError: it closed without a word.
      ValueError: this is no worker in a rendezvous.
    """
    if not line:
        raise ConnectionResetError
    with contextlib.suppress(ValueError):
        message = from_json(line)
        if isinstance(message, dict) and message.get("protocol") == PROTOCOL:
            return message
    raise ValueError(line)


def describe(error: Exception, host: str) -> str:
    """Formats why a peer does not answer."""
    match error:
        case ValueError():
            return "something else than a tfdist worker answers there"
        case socket.gaierror():
            return f"the host name {host!r} does not resolve"
        case ConnectionResetError():
            return "it accepts connections and closes them without an answer"
        case TimeoutError():
            return "it does not answer; it hangs, its host is off, or a firewall is between"
    # asyncio joins the errors of several addresses to one, without a number.
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error):
        return "nothing listens there yet"
    return getattr(error, "strerror", None) or repr(error)
