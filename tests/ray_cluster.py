"""A real Ray cluster on loopback, each node with an address and a raylet of its own, that a test may take apart.

Run as a program it is the cluster: it obeys lines on stdin ("add", "remove ADDRESS") and ends when stdin does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping

import support

# Ray takes 127.0.0.1 for the machine's own address, and others of loopback for what they are.
FIRST, HEAD = 2, "127.0.0.2"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # a killed head ends its drivers then, not in a minute
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


class RayCluster:
    """The test's end of it.

    Attributes:
      address: of the head, HOST:PORT.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._answer()

    @property
    def variables(self) -> dict[str, str]:
        """What a program has in its environment to join it."""
        return SETTINGS | {"RAY_ADDRESS": self.address}

    def add(self) -> str:
        """Adds a node of one processor; its address."""
        return self._tell("add")

    def remove(self, address: str) -> None:
        """Kills a node with all that runs there."""
        self._tell(f"remove {address}")

    def kill(self) -> None:
        """Kills the head and all nodes."""
        self._process.stdin.close()
        self._process.wait(60)

    def _tell(self, order: str) -> str:
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        line = self._process.stdout.readline().strip()
        assert line, "the Ray cluster of the test ended"
        return line


@contextlib.contextmanager
def running(nodes: int, *, port: int | None = None, variables: Mapping[str, str] = {}) -> Iterator[RayCluster]:
    """A cluster of so many nodes of one processor each, the head among them; nothing of it is left afterwards."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(nodes), str(port or support.free_ports(1)[0])],
            env=support.clean_environment() | SETTINGS | dict(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        cluster = None
        try:
            cluster = RayCluster(process)
            yield cluster
        finally:
            if cluster is None:
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace"))
            process.stdin.close()
            try:
                process.wait(60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def main(nodes: int, port: int) -> None:
    """Is the cluster."""
    from ray.cluster_utils import Cluster

    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray talks
    head = {"num_cpus": 1, "node_ip_address": HEAD, "gcs_server_port": port, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    by_address = {}

    def add() -> str:
        address = f"127.0.0.{FIRST + 1 + len(by_address)}"
        by_address[address] = cluster.add_node(num_cpus=1, node_ip_address=address)
        return address

    for _ in range(nodes - 1):
        add()
    print(cluster.address, file=said)
    for line in sys.stdin:
        order, *address = line.split()
        if order == "remove":
            cluster.remove_node(by_address[address[0]], allow_graceful=False)
        print(add() if order == "add" else "done", file=said)
    cluster.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
