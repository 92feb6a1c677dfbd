"""The launcher ray: the workers are processes of a Ray cluster, each under an actor on the node where Ray put it.

Ray places them (a placement group) and says which node is gone; the rest is as for workers of this machine: what an
actor shows of its process is written to files here, where the supervision looks.

Invariant: nothing is left of the actors and their processes when `start` ends, or when this process does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.launch.horovod_workers import serve_rendezvous
from tfdist.launch.hosted_worker import HostedWorker, HostLostError, start_hosted
from tfdist.launch.plan import Plan
from tfdist.launch.processes import Worker
from tfdist.launch.ray import cluster
from tfdist.launch.ray.cluster import Resources
from tfdist.launch.supervise.output import Output
from tfdist.launch.worker_host import WorkerHost

ASK_SECONDS = 0.5
FIRST_WORD_SECONDS, NEXT_WORD_SECONDS = 10.0, 60.0  # that Ray has no place yet
PLACEMENT_SECONDS = 30.0  # after which a run that may continue with fewer workers does
_CALLS_AT_ONCE = 4  # of one actor


class _RayHost:
    """The actor of a worker."""

    inherited: Mapping[str, str] = {}  # Ray's own environment stays

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return self._ray.get(getattr(self._actor, method).remote(*arguments))
        except self._ray.exceptions.RayError as error:
            raise HostLostError(cluster.reason(error)) from error

    def send(self, signal_number: int) -> None:
        self._actor.send.remote(signal_number)


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
        ray = at_end.enter_context(cluster.connect("A run on Ray", working_dir=working_dir))
        assign = None
        if is_horovod:
            assign = at_end.enter_context(serve_rendezvous(ray.util.get_node_ip_address(), listens_on=""))
        started_in = os.getcwd() if working_dir is None else None
        places = _RayPlacement(ray, resources, output.report, may_shrink, started_in)
        yield at_end.enter_context(start_hosted(plan, output, places.find, assign, places.remove))


class _RayPlacement:
    """Where Ray puts the workers: a placement group, and an actor at each of its places."""

    def __init__(
        self, ray: Any, resources: Resources, report: Callable[[str], None], may_shrink: bool, directory: str | None
    ) -> None:
        self._ray, self._resources, self._report = ray, resources, report
        self._may_shrink, self._directory = may_shrink, directory
        self._group: Any = None
        self._actors: list[Any] = []

    def find(self, workers: Sequence[HostedWorker]) -> list[tuple[str, _RayHost]]:
        """The node and the actor of each worker; nothing where they ended before Ray had a place for all."""
        ray = self._ray
        try:
            if not self._wait_for_group(workers):
                return []
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            kind = ray.remote(WorkerHost)
            for number in range(len(workers)):
                place = strategy(placement_group=self._group, placement_group_bundle_index=number)
                options = self._resources.options | {"max_concurrency": _CALLS_AT_ONCE, "scheduling_strategy": place}
                self._actors.append(kind.options(**options).remote(self._directory))
            nodes = ray.get([actor.__ray_call__.remote(_node_address) for actor in self._actors])
        except ray.exceptions.RayError as error:
            raise HostLostError(cluster.reason(error)) from error
        order = sorted(range(len(nodes)), key=nodes.__getitem__)  # the workers of a node have numbers side by side
        hosts = ", ".join(f"worker {w.index} on {nodes[n]}" for w, n in zip(workers, order, strict=True))
        self._report(f"Ray placed {hosts}.")
        return [(nodes[number], _RayHost(ray, self._actors[number])) for number in order]

    def remove(self, finding: threading.Thread) -> None:
        """Ends the actors, all of which are known when the thread has ended, and gives the places back."""
        finding.join()
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)

    def _wait_for_group(self, workers: Sequence[HostedWorker]) -> bool:
        """Whether all have a place, as Ray found it; waits as long as they are wanted."""
        resources, count, begun = self._resources, len(workers), time.monotonic()
        strategy = resources.placement.upper()
        self._group = self._ray.util.placement_group([resources.bundle] * count, strategy=strategy)
        reported_at = begun + FIRST_WORD_SECONDS - NEXT_WORD_SECONDS
        while all(worker.poll() is None for worker in workers):
            if self._group.wait(ASK_SECONDS):
                return True
            now = time.monotonic()
            if self._may_shrink and now - begun > PLACEMENT_SECONDS:
                last = workers[-1]
                last.fail(f"worker {last.index}: Ray has had no place for it for {PLACEMENT_SECONDS:g} s")
            elif now - reported_at >= NEXT_WORD_SECONDS:
                reported_at = now
                self._report(
                    f"Waiting for Ray to place {count} × {resources}; {cluster.describe_resources(self._ray)}."
                )
        return False


def _node_address(_: object) -> str:
    import ray

    return ray.util.get_node_ip_address()
