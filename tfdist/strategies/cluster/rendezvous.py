"""Waits until every worker of the cluster is there, before TensorFlow starts its own servers.

TensorFlow 2.21 waits an hour for a missing peer, in MultiWorkerMirroredStrategy's constructor, without a word and
deaf to SIGINT and SIGTERM. Its coordination service can wait at a barrier with a timeout, which names missing workers.
Worker 0 stays deaf to SIGTERM there, no worker is named while worker 0 is missing, and different clusters connect.
So each worker first listens at its own address with a protocol of one JSON line, asks every peer who it is, and says
for whom it waits. A worker is `ready` when all peers answered it; it leaves, and gives the port to TensorFlow, when
all peers are ready and each has heard that this one is.

Invariant: when one worker returns, all workers have seen all, with the same cluster and each in its own place; who
has not yet returned needs nothing more from those that did. (A peer that said it was ready and then answers no more
has gone on, knowing all it must.)

Imports no TensorFlow.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import itertools
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

from tfdist.errors import PeerLostError, UserError
from tfdist.strategies.cluster import hello
from tfdist.strategies.cluster.tf_config import Cluster, split_address

ASK_SECONDS = 0.1  # between two questions to a peer, in a cluster of up to 16
MOST_ASK_SECONDS = 15.0  # in a large one
MOST_QUESTIONS = 256  # at once, as each takes a descriptor here and there
ANSWER_SECONDS = 5.0  # for one question and its answer
BIND_PATIENCE_SECONDS = 2.0  # for a process that is just ending to free the port
FIRST_WORD_SECONDS = 3.0  # before saying for whom this worker waits
NEXT_WORD_SECONDS = 30.0


class AddressTakenError(UserError):
    """Something else listens at this worker's address."""


def rendezvous(
    cluster: Cluster,
    *,
    timeout_seconds: float,
    on_wait: Callable[[str], None] = lambda message: None,
    name_patience_seconds: float = 10.0,
) -> None:
    """Returns when every worker of the cluster has seen every other.

    Args:
      timeout_seconds: how long to wait for workers that do not answer.
      on_wait: is told for whom this worker waits, after some seconds and whenever that changes.
      name_patience_seconds: how long a host name may fail to resolve. Where names appear only when a host starts
        (Kubernetes), as long as `timeout_seconds`.

    Raises:
      UserError: this worker's port is taken, a name does not resolve, or a peer has another TF_CONFIG.
      PeerLostError: somebody did not come in time.
    """
    if cluster.num_workers > 1:
        asyncio.run(_Meeting(cluster, timeout_seconds, on_wait, name_patience_seconds).hold())


@dataclasses.dataclass
class _Peer:
    """What this worker knows of another."""

    index: int
    address: str
    trouble: str = "not asked yet"
    trouble_since: float = 0.0
    is_ready: bool = False  # by its own word all its peers answered it
    waits_for: tuple[int, ...] = ()  # by its own word
    heard_ready: bool = False  # it answered a question that said that this worker is ready
    start: str = ""  # differs each time the peer's process starts

    @property
    def is_done(self) -> bool:
        return self.is_ready and self.heard_ready

    def note(self, said: dict[str, Any]) -> None:
        """Takes over what the peer says of itself. What it once said stays true until its process starts anew."""
        if said["start"] != self.start:
            self.start, self.is_ready, self.heard_ready = said["start"], False, False
        self.is_ready = self.is_ready or said["ready"]
        self.waits_for = tuple(said["waits_for"])


class _Meeting:
    """One rendezvous; all its state belongs to one event loop."""

    def __init__(
        self, cluster: Cluster, timeout_seconds: float, on_wait: Callable[[str], None], name_patience_seconds: float
    ) -> None:
        self.cluster = cluster
        self.timeout_seconds = timeout_seconds
        self.on_wait = on_wait
        self.name_patience_seconds = name_patience_seconds
        self.peers = {i: _Peer(i, a) for i, a in enumerate(cluster.workers) if i != cluster.worker_index}
        self.failure: UserError | None = None
        self.start = uuid.uuid4().hex
        self.workers = hello.listed(cluster.workers)
        self.unanswered = dict.fromkeys(self.peers)  # a set that keeps its order
        self.ready = asyncio.Event()
        self.questions = asyncio.Semaphore(MOST_QUESTIONS)
        self.ask_seconds = min(MOST_ASK_SECONDS, ASK_SECONDS * max(1.0, cluster.num_workers / 16))

    @property
    def is_ready(self) -> bool:
        return not self.unanswered

    async def hold(self) -> None:
        servers = [
            await asyncio.start_server(self._answer, sock=s, limit=hello.MAX_LINE_BYTES) for s in await self._listen()
        ]
        me = self.cluster.worker_index
        around = sorted(self.peers.values(), key=lambda peer: (peer.index < me, peer.index))  # not all at the first
        tasks = [asyncio.create_task(self._ask_until_done(peer)) for peer in around]
        tasks.append(asyncio.create_task(self._tell()))
        try:
            async with asyncio.timeout(self.timeout_seconds):
                while not all(peer.is_done for peer in self.peers.values()):
                    await asyncio.wait(tasks, timeout=ASK_SECONDS / 2, return_when=asyncio.FIRST_EXCEPTION)
                    for task in tasks:
                        if task.done():
                            task.result()  # raises where a task found a bug
                    if self.failure:
                        await asyncio.sleep(3 * self.ask_seconds)  # the peer that does not fit asks too and hears it
                        raise self.failure
        except TimeoutError:
            raise PeerLostError(self._missing()) from None
        finally:
            await hello.end(tasks, servers)

    async def _listen(self) -> list[socket.socket]:
        """Listens at this worker's port: on loopback alone if the whole cluster is there, else on all interfaces.

        TensorFlow listens on all interfaces, and the given host may be a name that this machine itself resolves to
        something which peers cannot reach.
        """
        host, port = split_address(self.cluster.address)
        where = host if self.cluster.is_of_one_machine else None
        give_up = time.monotonic() + BIND_PATIENCE_SECONDS
        while True:
            try:
                return hello.listen(where, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= give_up:
                    kind = AddressTakenError if error.errno == errno.EADDRINUSE else UserError
                    raise kind(self._cannot_listen(port, error)) from error
                await asyncio.sleep(ASK_SECONDS)

    def _cannot_listen(self, port: int, error: OSError) -> str:
        me = f"{self.cluster.task_name(self.cluster.worker_index)} cannot listen at its address {self.cluster.address}"
        if error.errno == errno.EADDRINUSE:
            return (
                f"{me}: port {port} of this machine is already in use. Is another run, or another process with the "
                "same task.index, still there? End it, or give this task another port in every worker's TF_CONFIG."
            )
        return f"{me}: {error.strerror or error}. Give it another address in every worker's TF_CONFIG."

    def _hello(self) -> bytes:
        return hello.encode(
            start=self.start,
            index=self.cluster.worker_index,
            workers=self.workers,
            ready=self.is_ready,
            waits_for=list(itertools.islice(self.unanswered, hello.MOST_NAMED)),
        )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one question; what a peer says of itself with it counts too."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                question = hello.decode(await reader.readline())
                writer.write(self._hello())
                await writer.drain()
            self._check(question, asked=None)
            if peer := self.peers.get(question["index"]):
                peer.note(question)
        except UserError as error:
            self.failure = self.failure or error
        except (OSError, TimeoutError, ValueError, hello.WrongPeer):
            pass  # a port scanner, or a peer that went away; peers ask again
        except asyncio.CancelledError:
            pass  # the meeting is over; asyncio would print a traceback for a cancelled handler
        finally:
            writer.close()

    async def _ask_until_done(self, peer: _Peer) -> None:
        while not peer.is_done:
            async with self.questions:
                was_ready = self.is_ready
                await self._ask_once(peer)
            with contextlib.suppress(TimeoutError):  # who has become ready has something new to say
                async with asyncio.timeout(self.ask_seconds):
                    await (asyncio.sleep(self.ask_seconds) if was_ready else self.ready.wait())

    async def _ask_once(self, peer: _Peer) -> None:
        was_ready = self.is_ready
        try:
            answer = await self._ask(peer)
            self._check(answer, asked=peer)
            peer.note(answer)
            peer.heard_ready, peer.trouble = was_ready, ""
            self.unanswered.pop(peer.index, None)
            if self.is_ready:
                self.ready.set()
        except UserError as error:
            self.failure = self.failure or error
        except (OSError, TimeoutError, hello.WrongPeer) as error:
            if was_ready and peer.is_ready and isinstance(error, ConnectionError | hello.WrongPeer):
                peer.heard_ready = True  # it left, which it does only when it knows that all are ready
            else:
                self._trouble(peer, error)

    async def _ask(self, peer: _Peer) -> dict[str, Any]:
        host, port = split_address(peer.address)
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await hello.connect(host, port)
            try:
                writer.write(self._hello())
                return hello.decode(await reader.readline())
            except ValueError as error:
                raise hello.WrongPeer("a line without end") from error
            finally:
                writer.close()

    def _check(self, said: dict[str, Any], asked: _Peer | None) -> None:
        """Raises a `UserError` if a peer's own account of itself does not fit this worker's TF_CONFIG."""
        index, workers = said["index"], said["workers"]
        me = self.cluster.task_name(self.cluster.worker_index)
        if workers != self.workers:
            raise UserError(
                f"Two workers have different clusters in TF_CONFIG; all must have the same, in the same order.\n"
                f"  {me} (this one): {', '.join(self.workers)}\n"
                f"  worker {index}{f' at {asked.address}' if asked else ''}: {', '.join(map(str, workers))}"
            )
        if asked and index != asked.index:
            raise UserError(
                f"At {asked.address}, the address of {self.cluster.task_name(asked.index)}, answers a process whose "
                f"TF_CONFIG says that it is {self.cluster.task_name(index)}. Set task.type and task.index of each "
                "process to its place in the cluster."
            )
        if not asked and index == self.cluster.worker_index:
            raise UserError(
                f"Another process says that it is {me} too. Give each process its own task.index in TF_CONFIG."
            )

    def _trouble(self, peer: _Peer, error: Exception) -> None:
        """Notes why a peer does not answer; ends the waiting where waiting cannot help."""
        trouble, patience = hello.describe(error, split_address(peer.address)[0], self.name_patience_seconds)
        now = time.monotonic()
        if trouble != peer.trouble:
            peer.trouble, peer.trouble_since = trouble, now
        if patience is not None and now - peer.trouble_since >= patience:
            name = self.cluster.task_name(peer.index)
            kind = AddressTakenError if isinstance(error, hello.WrongPeer) else UserError
            self.failure = self.failure or kind(
                f"{name} cannot be reached at its address {peer.address} of TF_CONFIG: {trouble}."
            )

    def _list(self) -> str:
        """The peers that hold up the meeting and why: those that do not answer, or else those that wait themselves."""
        late = [peer for peer in self.peers.values() if peer.trouble]
        late = late or [peer for peer in self.peers.values() if not peer.is_done]
        shown = [f"{self.cluster.task_name(p.index)} at {p.address} ({self._why(p)})" for p in late[: hello.MOST_NAMED]]
        more = [f"{len(late) - len(shown):,} more"] if len(late) > len(shown) else []
        return "; ".join([*shown, *more])

    def _why(self, peer: _Peer) -> str:
        waits_for = [self.cluster.task_name(index) for index in peer.waits_for]
        return peer.trouble or (f"it waits for {' and '.join(waits_for)}" if waits_for else "it is about to continue")

    def _missing(self) -> str:
        me = self.cluster.task_name(self.cluster.worker_index)
        return (
            f"{me} waited {self.timeout_seconds:g} s and gives up; missing: {self._list()}. Start all workers within "
            "that time of each other, and check that the addresses in TF_CONFIG can be reached from this machine."
        )

    async def _tell(self) -> None:
        """Says for whom this worker waits: after a moment, when that has changed for good, and now and then."""
        await asyncio.sleep(FIRST_WORD_SECONDS)
        before, said, said_at = self._list(), "", 0.0
        while True:
            waiting_for = self._list()
            is_news = waiting_for != said and waiting_for == before
            if is_news or time.monotonic() - said_at >= NEXT_WORD_SECONDS:
                self.on_wait(f"waiting for {waiting_for}")
                said, said_at = waiting_for, time.monotonic()
            before = waiting_for
            await asyncio.sleep(1.0)
