"""The launcher horovod: N processes on this machine that find each other through Horovod's own rendezvous server.

Invariant: the server, which runs in the launcher, ends with its context. Where all workers are on this machine, they
and the server listen on the loopback interface alone.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

from tfdist.errors import UserError
from tfdist.launch.local_workers import HOST, start_each
from tfdist.launch.plan import Plan
from tfdist.launch.processes import Worker
from tfdist.launch.supervise.output import Output

TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"  # of a silent worker: on one machine only a stopped one is silent


@contextlib.contextmanager
def start(plan: Plan, output: Output) -> Iterator[Sequence[Worker]]:
    """Starts the workers; none is left when the context ends, whatever ends it.

    Raises:
      UserError: Horovod is not installed.
    """
    with serve_rendezvous(HOST, listens_on=HOST) as assign_variables:
        default = {TIMEOUT: plan.environment.get(TIMEOUT, "3600")}
        own = {index: default | each for index, each in enumerate(assign_variables([HOST] * len(plan.slot_numbers)))}
        with start_each(plan, output, own) as workers:
            yield workers


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
        """Returns the environment variables of each process, by the nodes' addresses."""
        hosts = [HostInfo(node, len(list(equal))) for node, equal in itertools.groupby(nodes)]
        slots = get_host_assignments(hosts, len(nodes))
        server.init(slots)
        common = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_address[1]),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        if set(nodes) <= {"127.0.0.1", "localhost"}:
            common["HOROVOD_GLOO_IFACE"] = "lo"
        return [common | create_slot_env_vars(slot) for slot in slots]

    try:
        yield assign_variables
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
