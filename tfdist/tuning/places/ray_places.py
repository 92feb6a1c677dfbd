"""The places of a sweep on a Ray cluster: one actor each, which Ray puts where there is room.

A place that is lost, with its node or alone, is asked for anew, and its trial is told to have been interrupted. Nothing
is kept in Ray: when the chief ends, so do the actors and their trials, and the sweep's journal says what was.

Invariant: a trial has one process at a time that counts. Should one live on where the network was cut, the lease of its
run directory keeps the next one out until it has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from tfdist.errors import EXIT_PREEMPTED, TfdistError, UserError
from tfdist.launch.ray import cluster
from tfdist.launch.ray.cluster import Resources
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.places.machine import OUT_OF_MEMORY
from tfdist.tuning.places.places import Ended, Next, Place, Setting, name_of
from tfdist.tuning.places.ray_place import RayPlace
from tfdist.tuning.schedule.signals import open_waking
from tfdist.tuning.schedule.trial import EXIT_KILLED

FIRST_WORD_SECONDS, NEXT_WORD_SECONDS = 10.0, 60.0  # that Ray has no place yet
MOST_BROKEN = 3  # places in a row that end before they are ready
_CALLS_AT_ONCE = 2  # of one actor


@dataclasses.dataclass(eq=False)
class _Actor:
    """A place; `host` is known once it is ready, `directory` while it runs a trial."""

    number: int
    handle: Any
    host: str | None = None
    directory: RunDirectory | None = None
    started: float = 0.0


class RayPlaces:
    """The places.

    Args:
      setting: how many, and what they run.
      resources: of each trial, or of each process of a trial of several.
      run_dir: of the sweep; it exists, and all nodes have it.
      working_dir: that Ray copies to every node; None: they share it.
      tell: takes what the user should know.

    Raises:
      UserError: no cluster can be reached.
    """

    def __init__(
        self,
        setting: Setting,
        resources: Resources,
        *,
        run_dir: str,
        working_dir: str | None,
        tell: Callable[[str], None],
    ) -> None:
        several = setting.processes > 1
        self._setting = dataclasses.replace(setting, count=1, on_ray=resources if several else None)
        self._resources, self._options = resources, {"num_cpus": 0} if several else resources.options
        self._run_dir, self._tell = _absolute(run_dir), tell
        self._directory = os.getcwd() if working_dir is None else None
        self._mark = uuid.uuid4().hex
        files.write_atomic(RunDirectory(self._run_dir).sweep_mark, self._mark)
        self._news: queue.SimpleQueue[tuple[_Actor, Future[Any]]] = queue.SimpleQueue()
        self._broken = 0  # places in a row
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            self._woken, self._wake = open_waking(opened)
            os.set_blocking(self._woken, False)
            self._ray = opened.enter_context(cluster.connected("A sweep on Ray", working_dir=working_dir))
            self._closing = opened.pop_all()
        self._actors = [self._new(number) for number in range(setting.count)]
        self._lonely_since, self._next_word = time.monotonic(), FIRST_WORD_SECONDS

    def fileno(self) -> int:
        """Becomes readable when a process has ended, or a place has become free."""
        return self._woken

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def next_free(self) -> Place:
        actor = self._free[0]
        return Place(actor.number, actor.host)

    def start(self, directory: RunDirectory, parameters: Sequence[str]) -> None:
        """Starts a training in the next free place."""
        actor = self._free[0]
        actor.directory, actor.started = directory, time.monotonic()
        name = f"trial {name_of(directory)}"  # as Ray's dashboard shows it
        self._follow(actor, actor.handle.run.options(name=name).remote(_absolute(directory.path), list(parameters)))

    def build(self, upcoming: Next) -> None:
        """Nothing: which node will be free first is not known."""

    def stop(self, directory: RunDirectory) -> None:
        """Lets a process save and leave."""
        for actor in self._actors:
            if actor.directory is not None and name_of(actor.directory) == name_of(directory):
                actor.handle.stop.remote(_absolute(directory.path))

    def ended(self) -> Iterator[Ended]:
        """The processes that ended since, those of lost places among them.

        Raises:
          UserError: a node does not have the run directory.
          TfdistError: no place comes up.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1 << 12)
        while not self._news.empty():
            actor, future = self._news.get()
            if actor not in self._actors:
                continue
            try:
                result = future.result()
            except self._ray.exceptions.RayError as error:
                yield from self._lost(actor, error)
                continue
            if actor.host is None:
                actor.host, self._broken = result, 0
            else:
                actor.directory = None
                yield result
        self._remind()

    def close(self) -> None:
        """Ends all actors, and with them what they run."""
        for actor in self._actors:
            self._ray.kill(actor.handle)
        self._closing.close()

    @property
    def _free(self) -> list[_Actor]:
        return [actor for actor in self._actors if actor.host is not None and actor.directory is None]

    def _new(self, number: int) -> _Actor:
        handle = (
            self._ray.remote(RayPlace)
            .options(**self._options, max_concurrency=_CALLS_AT_ONCE)
            .remote(self._setting, self._directory)
        )
        actor = _Actor(number, handle)
        self._follow(actor, handle.join.remote(self._run_dir, self._mark))
        return actor

    def _follow(self, actor: _Actor, reference: Any) -> None:
        def heard(future: Future[Any]) -> None:
            self._news.put((actor, future))
            self._wake()

        reference.future().add_done_callback(heard)

    def _lost(self, actor: _Actor, error: Exception) -> Iterator[Ended]:
        """Asks for another place in the place of this one; what it ran was interrupted."""
        if isinstance(cause := getattr(error, "cause", None), UserError):
            raise cause
        why = cluster.reason(error)
        if actor.host is None:
            self._broken += 1
            if self._broken >= MOST_BROKEN:
                raise TfdistError(f"{self._broken} places on Ray in a row did not come up. The last: {error}")
        with contextlib.suppress(Exception):  # it is dead, most likely
            self._ray.kill(actor.handle)
        self._actors[self._actors.index(actor)] = self._new(actor.number)
        if actor.directory is None:
            return
        seconds, name = time.monotonic() - actor.started, name_of(actor.directory)
        if isinstance(error, self._ray.exceptions.OutOfMemoryError):
            yield Ended(name, EXIT_KILLED, f"{why}\n{OUT_OF_MEMORY}", seconds)
            return
        self._tell(f"the place of trial {name} on {actor.host} was lost: {why}; the trial is queued again")
        yield Ended(name, EXIT_PREEMPTED, "", seconds, lost=f"its place on {actor.host} was lost: {why}")

    def _remind(self) -> None:
        """Says when nobody trains for want of room."""
        now = time.monotonic()
        if any(actor.host is not None for actor in self._actors):
            self._lonely_since, self._next_word = now, FIRST_WORD_SECONDS
        elif now - self._lonely_since > self._next_word:
            self._lonely_since, self._next_word = now, NEXT_WORD_SECONDS
            wanted = self._resources if self._setting.on_ray is None else "a place"
            self._tell(f"waiting for Ray to find {wanted} for a trial; {cluster.room(self._ray)}")


def _absolute(path: str) -> str:
    return path if files.is_remote(path) else os.path.abspath(path)
