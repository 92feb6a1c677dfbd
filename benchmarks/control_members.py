"""The other members of a rendezvous, in one process: `python control_members.py PORT MEMBERS`.

Each listens at an address of its own and looks for the first member, which is the one that is measured.
"""

from __future__ import annotations

import asyncio
import sys

from tfdist.strategies.cluster.rendezvous import Meeting
from tfdist.strategies.cluster.tf_config import Cluster


def cluster_of(members: int, port: int, index: int) -> Cluster:
    """All on this machine, which is every address that begins with 127."""
    addresses = tuple(f"127.0.{i // 250}.{i % 250 + 1}:{port}" for i in range(members))
    return Cluster(addresses, "worker", index)


async def take_part(port: int, members: int) -> None:
    clusters = [cluster_of(members, port, index) for index in range(1, members)]
    print("here", flush=True)
    await asyncio.gather(*(Meeting(cluster, 600.0, lambda message: None).hold() for cluster in clusters))


if __name__ == "__main__":
    asyncio.run(take_part(int(sys.argv[1]), int(sys.argv[2])))
