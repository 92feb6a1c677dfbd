"""The launcher ray: the workers are processes of a Ray cluster, each under an actor on the node where Ray put it.

Ray places them (a placement group) and says which node is gone; the rest is as for workers of this machine: what an
actor shows of its process is written to files here, where the supervision looks.

Invariant: nothing is left of the actors and their processes when `start` ends, or when this process does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import EXIT_BUG, TfdistError
from tfdist.launch import local
from tfdist.launch.horovod.rendezvous import serve_rendezvous
from tfdist.launch.hosted_worker import HostedWorker, HostLostError
from tfdist.launch.plan import Plan
from tfdist.launch.processes import Worker
from tfdist.launch.ray import cluster
from tfdist.launch.ray.cluster import Resources
from tfdist.launch.supervise.output import Output
from tfdist.launch.worker_host import Seen, WorkerHost

ASK_SECONDS = 0.5
FIRST_WORD_SECONDS, NEXT_WORD_SECONDS = 10.0, 60.0  # that Ray has no place yet
PLACE_SECONDS = 30.0  # after which a run that may continue with fewer workers does
_DRAIN_SECONDS = 5.0
_CALLS_AT_ONCE = 4  # of one actor


class _RayHost:
    """The actor of a worker."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def look(self, seconds: float) -> Seen:
        try:
            return self._ray.get(self._actor.look.remote(seconds))
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
        ray = at_end.enter_context(cluster.connected("A run on Ray", working_dir=working_dir))
        directory = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-launch-")))
        meeting = (
            at_end.enter_context(serve_rendezvous(ray.util.get_node_ip_address(), listens_on=""))
            if is_horovod
            else None
        )
        workers = [HostedWorker(plan.first_index + number, directory, output) for number in range(len(plan.places))]
        at_end.callback(output.drain, _DRAIN_SECONDS)
        started_in = os.getcwd() if working_dir is None else None
        starting = _Starting(ray, plan, workers, resources, meeting, output.say, may_shrink, started_in)
        at_end.callback(starting.end)
        starting.thread.start()
        yield workers


class _Starting:
    """Places the workers, starts them, and follows each on a thread of its own."""

    def __init__(
        self,
        ray: Any,
        plan: Plan,
        workers: Sequence[HostedWorker],
        resources: Resources,
        meeting: Callable[[Sequence[str]], list[dict[str, str]]] | None,
        say: Callable[[str], None],
        may_shrink: bool,
        directory: str | None,
    ) -> None:
        self._ray, self._plan, self._workers, self._resources = ray, plan, workers, resources
        self._meeting, self._say, self._may_shrink, self._directory = meeting, say, may_shrink, directory
        self._begun = time.monotonic()
        self._group: Any = None
        self._actors: list[Any] = []
        self.thread = threading.Thread(target=self._run, name="tfdist-ray", daemon=True)

    def end(self) -> None:
        """Ends what there is of the workers."""
        for worker in self._workers:
            worker.send(signal.SIGKILL)
        self.thread.join()
        for actor in self._actors:
            self._ray.kill(actor)
        for worker in self._workers:
            worker.join()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)

    def _run(self) -> None:
        try:
            if self._find_places():
                self._start()
        except (self._ray.exceptions.RayError, TfdistError) as error:
            for worker in self._workers:
                worker.fail(f"worker {worker.index} could not be started: {error}")
        except Exception as error:
            for worker in self._workers:
                worker.fail(f"worker {worker.index} could not be started: {error!r}", EXIT_BUG)
            raise

    @property
    def _is_wanted(self) -> bool:
        return all(worker.poll() is None for worker in self._workers)

    def _find_places(self) -> bool:
        """Whether all have a place, as Ray found it; waits as long as they are wanted."""
        resources, count = self._resources, len(self._workers)
        strategy = resources.placement.upper()
        self._group = self._ray.util.placement_group([resources.bundle] * count, strategy=strategy)
        told = self._begun + FIRST_WORD_SECONDS - NEXT_WORD_SECONDS
        while self._is_wanted:
            if self._group.wait(ASK_SECONDS):
                return True
            now = time.monotonic()
            if self._may_shrink and now - self._begun > PLACE_SECONDS:
                last = self._workers[-1]
                last.fail(f"worker {last.index}: Ray has had no place for it for {PLACE_SECONDS:g} s")
            elif now - told >= NEXT_WORD_SECONDS:
                told = now
                self._say(f"Waiting for Ray to place {count} × {resources}; {cluster.room(self._ray)}.")
        return False

    def _start(self) -> None:
        ray, plan = self._ray, self._plan
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        kind = ray.remote(WorkerHost)
        self._actors = [
            kind.options(
                **self._resources.options,
                max_concurrency=_CALLS_AT_ONCE,
                scheduling_strategy=strategy(placement_group=self._group, placement_group_bundle_index=number),
            ).remote(self._directory)
            for number in range(len(self._workers))
        ]
        nodes = ray.get([actor.__ray_call__.remote(_node_address) for actor in self._actors])
        order = sorted(range(len(nodes)), key=nodes.__getitem__)  # the workers of a node have numbers side by side
        actors = [self._actors[number] for number in order]
        addresses = ray.get([actor.meet.remote(nodes[n]) for actor, n in zip(actors, order, strict=True)])
        for number, (worker, actor) in enumerate(zip(self._workers, actors, strict=True)):
            if self._meeting is None:
                found = {"TF_CONFIG": local.tf_config(addresses, number)}
            else:
                found = self._meeting([nodes[n] for n in order])[number]
            variables = plan.launcher_variables | plan.own_variables(worker.index) | found
            if worker.begin(_RayHost(ray, actor)):
                ray.get(actor.start.remote(worker.index, plan.command[1:], variables))
                worker.follow()
        hosts = ", ".join(f"worker {w.index} on {nodes[n]}" for w, n in zip(self._workers, order, strict=True))
        self._say(f"Ray placed {hosts}.")


def _node_address(_: object) -> str:
    import ray

    return ray.util.get_node_ip_address()
