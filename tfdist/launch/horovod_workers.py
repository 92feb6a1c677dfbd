"""The launcher horovod: N processes on this machine that find each other through Horovod's own rendezvous server.

With a list of hosts the same command on each starts one process there, and the first host's launcher serves.

Invariant: the server, which runs in the launcher, ends with its context. Where all workers are on this machine, they
and the server listen on the loopback interface alone.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.errors import UserError
from tfdist.launch.local_workers import HOST, start_each
from tfdist.launch.own_host import check_own_name, find_interface
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
def start_one(plan: Plan, output: Output, *, addresses: Sequence[str]) -> Iterator[Sequence[Worker]]:
    """Starts this host's worker, of one at each of the addresses HOST:PORT.

    Raises:
      UserError: Horovod is not installed, or would not find this host.
    """
    check_horovod()
    check_own_name()
    hosts, ports = zip(*(address.rsplit(":", 1) for address in addresses), strict=True)
    index = plan.first_index
    with contextlib.ExitStack() as at_end:
        if index == 0:
            serving = serve_rendezvous(hosts[0], listens_on="", port=int(ports[0]))
            own = at_end.enter_context(serving)(hosts)[0]
        else:
            own = make_variables(assign_slots(hosts), hosts[0], int(ports[0]))[index]
        own["HOROVOD_GLOO_IFACE"] = find_interface(addresses[index])
        yield at_end.enter_context(start_each(plan, output, {index: own}))


def check_horovod() -> None:
    """Raises UserError where Horovod is not installed."""
    try:
        importlib.import_module("horovod.runner.gloo_run")
    except ImportError as error:
        raise UserError(f"Horovod is not installed: {error}. Run: python -m tfdist.build_horovod") from error


def assign_slots(nodes: Sequence[str]) -> list[Any]:
    """Horovod's slot of each process, by the nodes' addresses, equal ones side by side."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    hosts = [HostInfo(node, len(list(equal))) for node, equal in itertools.groupby(nodes)]
    return get_host_assignments(hosts, len(nodes))


def make_variables(slots: Sequence[Any], address: str, port: int) -> list[dict[str, str]]:
    """The environment variables of each slot's process; the server is at `address`."""
    from horovod.runner.gloo_run import create_slot_env_vars

    common = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    return [common | create_slot_env_vars(slot) for slot in slots]


@contextlib.contextmanager
def serve_rendezvous(
    address: str, *, listens_on: str, port: int = 0
) -> Iterator[Callable[[Sequence[str]], list[dict[str, str]]]]:
    """Yields a function that gives each process its variables, by the nodes' addresses, equal ones side by side.

    Args:
      address: of this node, where the others find the server.
      listens_on: the address that the server binds; empty for all interfaces, as `horovodrun` does.
      port: of the server; 0 takes a free one.

    Raises:
      UserError: Horovod is not installed.
    """
    check_horovod()
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((listens_on, port), RendezvousHandler, 0)
    thread = threading.Thread(target=server.serve_forever, name="tfdist-rendezvous", daemon=True)
    thread.start()

    def assign_variables(nodes: Sequence[str]) -> list[dict[str, str]]:
        """Returns the environment variables of each process, by the nodes' addresses."""
        slots = assign_slots(nodes)
        server.init(slots)
        on_loopback = {"HOROVOD_GLOO_IFACE": "lo"} if set(nodes) <= {"127.0.0.1", "localhost"} else {}
        return [on_loopback | each for each in make_variables(slots, address, server.server_address[1])]

    try:
        yield assign_variables
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
