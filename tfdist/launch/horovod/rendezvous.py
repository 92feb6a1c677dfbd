"""Where the processes of a Horovod run find each other: Horovod's own rendezvous server, in the launcher.

Invariant: the server ends with the context.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

from tfdist.errors import UserError


@contextlib.contextmanager
def serve_rendezvous(address: str, *, listens_on: str) -> Iterator[Callable[[Sequence[str]], list[dict[str, str]]]]:
    """Yields a function that gives each process its variables, by the nodes' addresses, equal ones side by side.

    Args:
      address: of this node, where the others find the server.
      listens_on: the address that the server binds; empty for all interfaces, as `horovodrun` does.

    Raises:
      UserError: Horovod is not installed.
    """
    try:
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.gloo_run import create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        raise UserError(f"Horovod is not installed: {error}. Run: python tools/build_horovod.py") from error
    server = RendezvousHTTPServer((listens_on, 0), RendezvousHandler, 0)
    thread = threading.Thread(target=server.serve_forever, name="tfdist-rendezvous", daemon=True)
    thread.start()

    def assign_variables(nodes: Sequence[str]) -> list[dict[str, str]]:
        hosts = [HostInfo(node, len(list(equal))) for node, equal in itertools.groupby(nodes)]
        slots = get_host_assignments(hosts, len(nodes))
        server.init(slots)
        common = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_address[1]),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        return [common | create_slot_env_vars(slot) for slot in slots]

    try:
        yield assign_variables
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
