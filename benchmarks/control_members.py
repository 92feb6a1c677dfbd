"""The other members of a rendezvous, in one process: `python control_members.py PORT MEMBERS`.

Each listens at an address of its own and answers as tfdist's code does, but knows only the first member, which is the
one that is measured. They begin to ask it when a line comes on stdin.
"""

from __future__ import annotations

import asyncio
import sys

from tfdist.strategies.cluster import hello, rendezvous
from tfdist.strategies.cluster.tf_config import Cluster, split_address


def cluster_of(members: int, port: int, index: int) -> Cluster:
    """All on this machine, which is every address that begins with 127."""
    addresses = tuple(f"127.0.{i // 250}.{i % 250 + 1}:{port}" for i in range(members))
    return Cluster(addresses, "worker", index)


async def take_part(port: int, members: int) -> None:
    asking = []
    for index in range(1, members):
        cluster = cluster_of(members, port, index)
        member = rendezvous._Meeting(cluster, 600.0, lambda message: None, 10.0)
        member.unanswered = {0: None}
        member.peers = {0: member.peers[0]}
        asking.append((member._ask_until_done, member.peers[0]))
        (listening,) = hello.listen(*split_address(cluster.address))
        await asyncio.start_server(member._answer, sock=listening, limit=hello.MAX_LINE_BYTES)
    print("listening", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(ask(peer) for ask, peer in asking))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(take_part(int(sys.argv[1]), int(sys.argv[2])))
