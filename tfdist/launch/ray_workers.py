"""The launcher ray: the workers are processes of a Ray cluster, each under an actor on the node where Ray put it.

Ray places them (a placement group) and says which node is gone; the rest is as for workers of this machine: what an
actor shows of its process is written to files here, where the supervision looks.

Invariant: a cluster is joined, never started or guessed: `RAY_ADDRESS` names it. Nothing is left of the actors and
their processes when `start` ends, or when this process does. Ray is imported when it is wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.errors import UserError, check_package, format_first_line
from tfdist.launch.horovod_workers import serve_rendezvous
from tfdist.launch.plan import Plan
from tfdist.launch.processes import OUT_OF_MEMORY, Worker
from tfdist.launch.supervise.output import Output
from tfdist.launch.worker_host import HostedWorker, HostLostError, WorkerHost, start_hosted
from tfdist.strategies.cluster import environment, tf_config

ADDRESS = "RAY_ADDRESS"
PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")  # Ray's strategies of a placement group
_GIB = 1 << 30
_ANSWER_SECONDS = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ASK_SECONDS = 0.5
FIRST_WORD_SECONDS, NEXT_WORD_SECONDS = 10.0, 60.0  # that Ray has no place yet
PLACEMENT_SECONDS = 30.0  # after which a run that may continue with fewer workers does
_CALLS_AT_ONCE = 4  # of one actor


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
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "memory": self.bundle.get("memory")}

    @property
    def bundle(self) -> dict[str, float]:
        """The resources as a bundle of a placement group."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(int((self.memory_gb or 0) * _GIB))}
        return {name: value for name, value in wanted.items() if value} or {"CPU": 0.001}


@dataclasses.dataclass
class _RayHost:
    """The actor of a worker; `inherited` is nothing, since Ray's own environment stays."""

    ray: Any
    actor: Any
    inherited: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return self.ray.get(getattr(self.actor, method).remote(*arguments))
        except self.ray.exceptions.OutOfMemoryError as error:
            raise HostLostError(f"{_find_reason(error)}: {OUT_OF_MEMORY}") from error
        except self.ray.exceptions.RayError as error:
            raise HostLostError(_find_reason(error)) from error

    def send(self, signal_number: int) -> None:
        self.actor.send.remote(signal_number)


@contextlib.contextmanager
def start(
    plan: Plan,
    output: Output,
    *,
    resources: Resources,
    is_horovod: bool = False,
    may_shrink: bool = False,
    working_dir: str | None = None,
) -> Iterator[Sequence[Worker]]:
    """Starts the workers; none is left when the context ends, whatever ends it.

    They are there at once, to be watched and signalled, while Ray looks for their places.

    Args:
      resources: of each.
      is_horovod: they find each other as Horovod's processes; else through TF_CONFIG.
      may_shrink: fails the last worker when Ray has no place for all of them, so that the rest may go without it.
      working_dir: that Ray copies to every node; None: they share that of the launcher.

    Raises:
      UserError: no cluster can be reached, or Horovod is not installed.
    """
    with contextlib.ExitStack() as at_end:
        ray = at_end.enter_context(_connect(working_dir))
        assign = None
        if is_horovod:
            assign = at_end.enter_context(serve_rendezvous(ray.util.get_node_ip_address(), listens_on=""))
        started_in = os.getcwd() if working_dir is None else None
        places = _RayPlacement(ray, resources, output.report, may_shrink, started_in)
        yield at_end.enter_context(start_hosted(plan, output, places.find, assign, places.remove))


@dataclasses.dataclass
class _RayPlacement:
    """Where Ray puts the workers: a placement group, and an actor at each of its places."""

    ray: Any
    resources: Resources
    report: Callable[[str], None]
    may_shrink: bool
    directory: str | None
    group: Any = None
    actors: list[Any] = dataclasses.field(default_factory=list)

    def find(self, workers: Sequence[HostedWorker]) -> list[tuple[str, _RayHost]]:
        """The node and the actor of each worker; nothing where they ended before Ray had a place for all."""
        ray = self.ray
        try:
            if not self._wait_for_group(workers):
                return []
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            kind = ray.remote(WorkerHost)
            for number in range(len(workers)):
                place = strategy(placement_group=self.group, placement_group_bundle_index=number)
                options = self.resources.options | {"max_concurrency": _CALLS_AT_ONCE, "scheduling_strategy": place}
                self.actors.append(kind.options(**options).remote(self.directory))
            addresses = [actor.__ray_call__.remote(lambda _: ray.util.get_node_ip_address()) for actor in self.actors]
            nodes = ray.get(addresses)
        except ray.exceptions.RayError as error:
            raise HostLostError(_find_reason(error)) from error
        order = sorted(range(len(nodes)), key=nodes.__getitem__)  # the workers of a node have numbers side by side
        hosts = ", ".join(f"worker {w.index} on {nodes[n]}" for w, n in zip(workers, order, strict=True))
        self.report(f"Ray placed {hosts}.")
        return [(nodes[number], _RayHost(ray, self.actors[number])) for number in order]

    def remove(self, finding: threading.Thread) -> None:
        """Ends the actors, all of which are known when the thread has ended, and gives the places back."""
        finding.join()
        for actor in self.actors:
            self.ray.kill(actor)
        if self.group is not None:
            self.ray.util.remove_placement_group(self.group)

    def _wait_for_group(self, workers: Sequence[HostedWorker]) -> bool:
        """Whether all have a place, as Ray found it; waits as long as they are wanted."""
        resources, count, begun = self.resources, len(workers), time.monotonic()
        strategy = resources.placement.upper()
        self.group = self.ray.util.placement_group([resources.bundle] * count, strategy=strategy)
        reported_at = begun + FIRST_WORD_SECONDS - NEXT_WORD_SECONDS
        while all(worker.poll() is None for worker in workers):
            if self.group.wait(ASK_SECONDS):
                return True
            now = time.monotonic()
            if self.may_shrink and now - begun > PLACEMENT_SECONDS:
                last = workers[-1]
                last.fail(f"worker {last.index}: Ray has had no place for it for {PLACEMENT_SECONDS:g} s")
            elif now - reported_at >= NEXT_WORD_SECONDS:
                reported_at = now
                wanted = {"CPU": resources.cpus, "GPU": resources.gpus, "GiB memory": resources.memory_gb or 0}
                each = ", ".join(f"{value:g} {name}" for name, value in wanted.items() if value) or "0 CPU"
                self.report(f"Waiting for Ray to place {count} × {each}. `ray status` lists what the cluster has.")
        return False


@contextlib.contextmanager
def _connect(working_dir: str | None) -> Iterator[Any]:
    """The module `ray`, connected to the cluster.

    Args:
      working_dir: a directory that Ray copies to every node, as the working directory of what runs there.

    Called by the main thread, whose handlers of signals stay as they are.

    Raises:
      UserError: Ray is not installed, or no cluster can be reached.
    """
    check_package("ray", "ray", "ray", "A run on Ray")
    import grpc
    import ray

    address = environment.current().get(ADDRESS, "")
    if tf_config.address_mistake(address):
        raise UserError(
            f"A run on Ray is started on a node of its cluster, and {ADDRESS} is {address or 'not set'}. Set it to the "
            f"head's address, {ADDRESS}=HOST:6379 as `ray start --head` prints it, or use `ray job submit`, which does."
        )
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        # Ray does not raise where nobody answers: it ends the process, or waits for ever for another server.
        socket.create_connection(tf_config.split_address(address), _ANSWER_SECONDS).close()
        if os.environ.get("RAY_USE_TLS", "0") == "0":
            with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
                grpc.channel_ready_future(channel).result(_ANSWER_SECONDS)
        environment_of_run = {"working_dir": working_dir} if working_dir else None
        ray.init(address, runtime_env=environment_of_run, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError, grpc.FutureTimeoutError) as error:
        why = "no Ray answers there." if isinstance(error, grpc.FutureTimeoutError) else format_first_line(error)
        raise UserError(
            f"A run on Ray cannot join a Ray cluster ({ADDRESS} is {address}): {why} Start one "
            f"with `ray start --head`, or set {ADDRESS} to its head's HOST:6379."
        ) from error
    for number, handler in handlers.items():  # Ray took them, to end the process
        signal.signal(number, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def _find_reason(error: BaseException) -> str:
    """Why an actor is gone, in few words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next((line for line in lines if line.startswith("The actor")), lines[0] if lines else type(error).__name__)
    return first.partition(" Node Id:")[0].rstrip(".")
