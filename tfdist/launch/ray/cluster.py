"""The connection to a Ray cluster, and what is asked of it for one process.

Invariant: a cluster is joined, never started or guessed: `RAY_ADDRESS` names it. Ray is imported when it is wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.errors import UserError, format_first_line, missing_extra
from tfdist.strategies.cluster import environment, tf_config

ADDRESS = "RAY_ADDRESS"
PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")  # Ray's strategies of a placement group
_GIB = 1 << 30
_ANSWER_SECONDS = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class Resources:
    """The resources that Ray reserves for one process.

    Attributes:
      cpus: may be a fraction, as may `gpus`.
      memory_gb: in GiB; None sets none aside.
      placement: of several processes, one of `PLACEMENTS`.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_gb: float | None = None
    placement: str = "pack"

    def mistake(self) -> str | None:
        """The first invalid field, as "NAME must be …; received VALUE"; None where there is none."""
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus), ("memory_gb", self.memory_gb or 0.0)):
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                return f"{name} must be a number of at least 0; received {value!r}"
        if self.gpus > 1 and self.gpus != int(self.gpus):
            return f"gpus above 1 must be a whole number, since Ray shares single GPUs only; received {self.gpus!r}"
        if self.placement not in PLACEMENTS:
            return f"placement must be one of {', '.join(PLACEMENTS)}; received {self.placement!r}"
        return None

    @property
    def options(self) -> dict[str, Any]:
        """The resources as options of an actor."""
        memory = {} if self.memory_gb is None else {"memory": int(self.memory_gb * _GIB)}
        return {"num_cpus": self.cpus, "num_gpus": self.gpus} | memory

    @property
    def bundle(self) -> dict[str, float]:
        """The resources as a bundle of a placement group."""
        memory = {} if self.memory_gb is None else {"memory": float(int(self.memory_gb * _GIB))}
        wanted = {"CPU": self.cpus, "GPU": self.gpus} | memory
        return {name: value for name, value in wanted.items() if value} or {"CPU": 0.001}

    def __str__(self) -> str:
        return ", ".join(f"{value:g} {name}" for name, value in _name_resources(self.bundle).items())


@contextlib.contextmanager
def connect(working_dir: str | None) -> Iterator[Any]:
    """The module `ray`, connected to the cluster.

    Args:
      working_dir: a directory that Ray copies to every node, as the working directory of what runs there.

    Called by the main thread, whose handlers of signals stay as they are.

    Raises:
      UserError: Ray is not installed, or no cluster can be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", "ray", "A run on Ray") from error
    address = environment.current().get(ADDRESS, "")
    if tf_config.address_mistake(address):
        raise UserError(
            f"A run on Ray is started on a node of its cluster, and {ADDRESS} is {address or 'not set'}. Set it to the "
            f"head's address, {ADDRESS}=HOST:6379 as `ray start --head` prints it, or use `ray job submit`, which does."
        )
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        # Ray does not raise where nobody answers, it ends the process.
        socket.create_connection(tf_config.split_address(address), _ANSWER_SECONDS).close()
        ray.init(
            address=address,
            runtime_env={"working_dir": working_dir} if working_dir else None,
            log_to_driver=False,
            configure_logging=True,
            logging_level=logging.ERROR,
        )
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UserError(
            f"A run on Ray cannot join a Ray cluster ({ADDRESS} is {address}): {format_first_line(error)} Start one "
            f"with `ray start --head`, or set {ADDRESS} to its head's HOST:6379."
        ) from error
    for number, handler in handlers.items():  # Ray took them, to end the process
        signal.signal(number, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def describe_resources(ray: Any) -> str:
    """Formats the resources of the living nodes as a clause, for messages about a wait for room."""
    count = sum(node["Alive"] for node in ray.nodes())
    total = {name: value for name, value in ray.cluster_resources().items() if name in ("CPU", "GPU", "memory")}
    has = ", ".join(f"{value:g} {name}" for name, value in _name_resources(total).items())
    return f"the cluster has {count} {'node' if count == 1 else 'nodes'} with {has or 'nothing'} in all"


def _name_resources(resources: Mapping[str, float]) -> dict[str, float]:
    return {
        "GiB memory" if name == "memory" else name: round(value / _GIB, 1) if name == "memory" else value
        for name, value in sorted(resources.items())
    }


def reason(error: BaseException) -> str:
    """Why an actor is gone, in few words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next((line for line in lines if line.startswith("The actor")), lines[0] if lines else type(error).__name__)
    return first.partition(" Node Id:")[0].rstrip(".")
