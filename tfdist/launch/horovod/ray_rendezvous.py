"""Where the processes of a Horovod run on Ray find each other: Horovod's own rendezvous server, in the launcher.

Invariant: the server ends with the context. It listens on all interfaces of the launcher's node, as under `horovodrun`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

from tfdist.errors import UserError


@contextlib.contextmanager
def rendezvous(address: str) -> Iterator[Callable[[Sequence[str]], list[dict[str, str]]]]:
    """A function that gives each process its variables, by the addresses of their nodes, equal ones side by side.

    Args:
      address: of this node, where the others find the server.

    Raises:
      UserError: Horovod is not installed.
    """
    try:
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.gloo_run import create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer
    except ImportError as error:
        raise UserError(f"Horovod is not installed: {error}. Run: python tools/build_horovod.py") from error
    server = RendezvousServer()
    port = server.start()

    def variables(nodes: Sequence[str]) -> list[dict[str, str]]:
        hosts = [HostInfo(node, len(list(equal))) for node, equal in itertools.groupby(nodes)]
        slots = get_host_assignments(hosts, len(nodes))
        server.init(slots)
        common = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        return [common | create_slot_env_vars(slot) for slot in slots]

    try:
        yield variables
    finally:
        server.stop()
