"""Asks the doctors of the other workers for their facts, each at its worker's own address, and answers them.

So it also finds out whether this worker's port is free, whether each peer can be reached, in both directions, and how
far the clocks are apart. Nothing is decided here: the run's own rendezvous is strategies/cluster/rendezvous.py.

Invariant: `meet` returns within `seconds`, whoever did not come; a worker leaves when it has asked and answered all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

from tfdist.doctor.facts import are_facts
from tfdist.doctor.findings import PROBLEM, WARNING, Finding, fine
from tfdist.strategies.cluster import hello
from tfdist.strategies.cluster.tf_config import Cluster, is_loopback, split_address
from tfdist.telemetry.json_text import from_json

GROUP = "workers"
PROTOCOL = "tfdist-doctor-1"
ASK_SECONDS = 0.2
MOST_QUESTIONS = 256  # at once
ANSWER_SECONDS = 3.0
CLOCK_SECONDS = 1.0  # more apart than this, logs laid side by side read wrong
PORTS_OF_KERNEL = "/proc/sys/net/ipv4/ip_local_port_range"


@dataclasses.dataclass
class Peer:
    """What was learned of another worker.

    Attributes:
      facts: its own account; None until it answered.
      clock_seconds: how far its clock is ahead of this one's, and by how much that may be wrong.
      asked: whether it asked this worker and was answered.
    """

    index: int
    address: str
    facts: dict[str, Any] | None = None
    clock_seconds: tuple[float, float] = (0.0, 0.0)
    asked: bool = False
    trouble: str = "not asked yet"


def meet(cluster: Cluster, facts: Mapping[str, Any], *, seconds: float) -> tuple[list[Peer], OSError | None]:
    """The peers, and why this worker cannot listen at its own address, where it cannot."""
    return asyncio.run(_Meeting(cluster, facts).hold(seconds))


class _Meeting:
    def __init__(self, cluster: Cluster, facts: Mapping[str, Any]) -> None:
        self.cluster = cluster
        self.facts = facts
        self.workers = hello.listed(cluster.workers)
        self.peers = {i: Peer(i, a) for i, a in enumerate(cluster.workers) if i != cluster.worker_index}
        self.questions = asyncio.Semaphore(MOST_QUESTIONS)

    async def hold(self, seconds: float) -> tuple[list[Peer], OSError | None]:
        """What was heard of each peer within the time, and why this worker could not listen, if it could not."""
        host, port = split_address(self.cluster.address)
        everywhere = not self.cluster.is_of_one_machine
        cannot_listen: OSError | None = None
        try:
            sockets = hello.listen(None if everywhere else host, port)
        except OSError as error:
            sockets, cannot_listen = [], error
        servers = [await asyncio.start_server(self._answer, sock=s, limit=hello.MAX_LINE_BYTES) for s in sockets]
        tasks = [asyncio.create_task(self._ask(peer)) for peer in self.peers.values()]
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                if all(p.facts is not None and (p.asked or cannot_listen) for p in self.peers.values()):
                    break
                await asyncio.sleep(0.02)
        finally:
            await hello.end(tasks, servers)
        return list(self.peers.values()), cannot_listen

    def _words(self) -> bytes:
        who = {"index": self.cluster.worker_index, "workers": self.workers}
        said = {"protocol": PROTOCOL, **who, "facts": self.facts, "time": time.time()}
        return json.dumps(said).encode() + b"\n"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                said = decode(await reader.readline())
                writer.write(self._words())
                await writer.drain()
                await reader.read(1)  # until the peer has read it and closes
            if peer := self.peers.get(said["index"]):
                peer.asked = True
        except (OSError, TimeoutError, ValueError, hello.WrongPeer, asyncio.CancelledError):
            pass  # somebody else, or a peer that went away; peers ask again
        finally:
            writer.close()

    async def _ask(self, peer: Peer) -> None:
        host, port = split_address(peer.address)
        while peer.facts is None:
            try:
                async with self.questions, asyncio.timeout(ANSWER_SECONDS):
                    reader, writer = await hello.connect(host, port)
                    try:
                        sent = time.time()
                        writer.write(self._words())
                        said = decode(await reader.readline())
                        received = time.time()
                    finally:
                        writer.close()
                ahead = said["time"] - (sent + received) / 2
                peer.clock_seconds = ahead, (received - sent) / 2
                peer.facts = {**said["facts"], "index": said["index"], "workers": said["workers"]}
            except (OSError, TimeoutError, hello.WrongPeer) as error:
                peer.trouble = hello.describe(error, host, 0.0)[0]
            except ValueError:
                peer.trouble = "it answers with a line without end"
            if peer.facts is None:
                await asyncio.sleep(ASK_SECONDS)


def decode(line: bytes) -> dict[str, Any]:
    """What a doctor said; raises hello.WrongPeer for anybody else."""
    if not line:
        raise ConnectionResetError
    try:
        said = from_json(line)
        is_ours = said["protocol"] == PROTOCOL and hello.is_index(said["index"]) and are_facts(said["facts"])
        is_ours = is_ours and isinstance(said["time"], float) and hello.is_texts(said["workers"])
    except (ValueError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        raise hello.WrongPeer(line)
    return said


def check_port(cluster: Cluster, cannot_listen: OSError | None) -> Finding:
    """A finding about this worker's own address."""
    me = cluster.task_name(cluster.worker_index)
    port = split_address(cluster.address)[1]
    if cannot_listen is not None:
        return Finding(
            PROBLEM,
            "ports",
            f"{me} cannot listen at its address {cluster.address}: {cannot_listen.strerror or cannot_listen}",
            "TensorFlow's server of this worker has to.",
            f"See who has it: ss -ltnp 'sport = :{port}'. End that, or give this task another address in every "
            "worker's TF_CONFIG.",
        )
    first, last = _ports_of_kernel()
    if first <= port <= last and not is_loopback(split_address(cluster.address)[0]):
        return Finding(
            WARNING,
            "ports",
            f"port {port} is one of those that the kernel gives to outgoing connections ({first} to {last})",
            "Any program of this machine may get it just before the run starts.",
            f"Take a port below {first} in TF_CONFIG.",
        )
    return fine("ports", f"{me} can listen at its address {cluster.address}")


def _ports_of_kernel() -> tuple[int, int]:
    try:
        with open(PORTS_OF_KERNEL) as file:
            first, last = map(int, file.read().split())
    except (OSError, ValueError):
        return 32768, 60999
    return first, last


def check_peer(cluster: Cluster, peer: Peer, *, seconds: float) -> list[Finding]:
    """Findings about whether another worker can be reached, is who it should be, and has the same time."""
    name = f"{cluster.task_name(peer.index)} at {peer.address}"
    if peer.facts is None:
        return [
            Finding(
                PROBLEM,
                GROUP,
                f"{name} did not answer within {seconds:g} s: {peer.trouble}",
                "A run waits for every worker of TF_CONFIG, and ends with status 4 when one does not come.",
                "Run the doctor on all machines at once. If it runs there, open the port in the firewall between and "
                f"see whether this machine reaches it: nc -vz {' '.join(map(str, split_address(peer.address)))}",
                {"worker": peer.index, "reason": peer.trouble},
            )
        ]
    if peer.facts["workers"] != hello.listed(cluster.workers) or peer.facts["index"] != peer.index:
        theirs = f"worker {peer.facts['index']} of {', '.join(map(str, peer.facts['workers']))}"
        return [
            Finding(
                PROBLEM,
                GROUP,
                f"{name} has another TF_CONFIG: {theirs}",
                "Workers with different clusters never meet.",
                "Give all workers the same cluster, in the same order, and each its own task.index.",
            )
        ]
    findings = []
    if not peer.asked:
        findings.append(
            Finding(
                WARNING,
                GROUP,
                f"{name} was reached from here and did not reach this worker within {seconds:g} s",
                "Connections go both ways between workers.",
                f"Open the port of {cluster.address} in the firewall before this machine.",
            )
        )
    ahead, error = peer.clock_seconds
    findings += check_clock(name, ahead, error)
    if not findings:
        shown = f"its clock differs by {abs(ahead) * 1e3:.1f} ms (±{error * 1e3:.1f})"
        findings.append(fine(GROUP, f"{name} answers, and asks; {shown}", worker=peer.index, clock_seconds=ahead))
    return findings


def check_clock(name: str, ahead_seconds: float, error_seconds: float) -> list[Finding]:
    """A finding where another worker's clock is off by more than what may be an error of measuring."""
    if abs(ahead_seconds) - error_seconds <= CLOCK_SECONDS:
        return []
    where = "ahead of" if ahead_seconds > 0 else "behind"
    return [
        Finding(
            WARNING,
            GROUP,
            f"{name} has its clock {abs(ahead_seconds):.1f} s {where} this one's",
            "Logs of workers cannot be laid side by side, and signatures for a bucket are refused from 15 minutes.",
            "Let both machines take their time from one server: timedatectl set-ntp true.",
        )
    ]


def hosts(cluster: Cluster) -> list[str]:
    """The hosts of the other workers."""
    others = [address for i, address in enumerate(cluster.workers) if i != cluster.worker_index]
    return list(dict.fromkeys(split_address(address)[0] for address in others))
