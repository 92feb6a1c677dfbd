"""The places of a sweep's workers on other machines, as its chief sees them: each trial there has a lease.

Invariant: a run is in one place at a time. A lease holds as long as its worker was heard from within `lease_seconds`;
then the run is queued again, and nothing that its worker says of it counts any more. The worker, which counts from
when it sent what the chief heard, has ended the process by then. A connection that breaks, as that of a killed process
does at once, is waited for `BROKEN_SECONDS`, in which a living worker tries again six times; should one live and not
get through, the lease of the run's own directory keeps the second process out until the first has ended. Messages are
those of `wire.py`; used by the chief's thread alone.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist.errors import EXIT_PREEMPTED
from tfdist.telemetry.json_text import from_json, to_json
from tfdist.tuning.cluster import wire
from tfdist.tuning.cluster.chief_server import ChiefServer
from tfdist.tuning.schedule.workers import Ended, Job, Place
from tfdist.tuning.search.trial_settings import TrialSettings

Claim = Callable[[str, TrialSettings, Place], Job | None]
Notify = Callable[[str], None]
BROKEN_SECONDS = 5.0
FIRST_REMINDER_SECONDS, LATER_REMINDER_SECONDS = 10.0, 60.0  # that nobody trains


@dataclasses.dataclass(frozen=True)
class Treaty:
    """What holds between a chief and its workers.

    Attributes:
      identity: of the sweep, which theirs must equal.
      mark: what stands in the mark of the run directory.
      lease_seconds: how long a lease holds without renewal.
    """

    identity: Mapping[str, Any]
    mark: str
    lease_seconds: float


@dataclasses.dataclass
class _Peer:
    """A worker; `session` is None while it is cut off, since `cut_at`, `first` the number of its first place.

    `takes_trials` is by its own word; `has_joined` once it was.
    """

    name: str
    first: int
    places: int
    session: int | None
    heard: float
    takes_trials: bool = False
    has_joined: bool = False
    cut_at: float = 0.0
    is_leaving: bool = False
    jobs: dict[str, Job] = dataclasses.field(default_factory=dict)

    @property
    def free(self) -> list[Place]:
        """Where a trial can begin."""
        return self.vacant if self.session is not None and self.takes_trials else []

    @property
    def vacant(self) -> list[Place]:
        """Where none is."""
        taken = {job.worker for job in self.jobs.values()}
        numbers = range(self.first, self.first + self.places)
        return [Place(number, self.name) for number in numbers if number not in taken]


class RemotePlaces:
    """The workers that have joined.

    Args:
      server: where they do.
      treaty: what they have to agree to.
      first: the number of the first place.
      claim: gives the run that a worker still holds from before the chief was started again, if nobody else has it.
      notify: takes what the user should know.
    """

    def __init__(self, server: ChiefServer, treaty: Treaty, *, first: int, claim: Claim, notify: Notify) -> None:
        self._server, self._treaty, self._claim, self._notify = server, treaty, claim, notify
        self._peers: dict[str, _Peer] = {}
        self._next_number = first
        self._over: dict[str, Any] | None = None
        self._lonely_since = time.monotonic()
        self._reminder_seconds = FIRST_REMINDER_SECONDS

    @property
    def num_free(self) -> int:
        return sum(len(peer.free) for peer in self._peers.values())

    @property
    def next_free(self) -> Place:
        return self._freest().free[0]

    @property
    def running(self) -> list[Job]:
        return [job for peer in self._peers.values() for job in peer.jobs.values()]

    def start(self, job: Job) -> None:
        """Gives a run to the worker that has most to spare."""
        peer = self._freest()
        job.worker, job.started = peer.free[0].number, time.monotonic()
        lease = uuid.uuid4().hex
        peer.jobs[lease] = job
        self._send(peer, wire.START, lease=lease, key=job.key, **job.settings.to_message())

    def stop(self, job: Job) -> None:
        """Lets a process save and leave."""
        for peer in self._peers.values():
            for lease, each in peer.jobs.items():
                if each is job:
                    self._send(peer, wire.STOP, lease=lease)

    def ended(self) -> Iterator[Ended[Job]]:
        """Hears what the workers say; the runs that ended, and those whose worker was lost."""
        for news in self._server.take():
            if news.message is None:
                for peer in self._peers.values():
                    if peer.session == news.session:
                        peer.session, peer.cut_at = None, news.at
                continue
            yield from self._hear(news.session, news.message, news.at)
        yield from self._lapsed(time.monotonic())
        self._remind()

    def dismiss(self, status: int, message: str) -> None:
        """The sweep has ended: the workers are told, and whoever comes later."""
        self._over = {"status": status, "message": message}
        for peer in self._peers.values():
            self._send(peer, wire.OVER, **self._over)

    def close(self) -> None:
        self._server.close()

    def _freest(self) -> _Peer:
        return max(self._peers.values(), key=lambda peer: len(peer.free))

    def _send(self, peer: _Peer, kind: str, **content: Any) -> None:
        if peer.session is not None:
            self._server.send(peer.session, {"kind": kind, **content})

    def _hear(self, session: int, message: dict[str, Any], at: float) -> Iterator[Ended[Job]]:
        kind = message["kind"]
        if kind == wire.HELLO:
            yield from self._greet(session, message, at)
            return
        peer = next((peer for peer in self._peers.values() if peer.session == session), None)
        if peer is None:  # it was refused, or it was lost and has to say hello again
            self._server.send(session, None)
            return
        peer.heard = at
        if kind == wire.RENEW:
            self._send(peer, wire.RENEWED, number=message["number"])
        elif kind == wire.READY:
            if not peer.has_joined:
                self._notify(f"{peer.name} has joined the sweep")
            peer.takes_trials = peer.has_joined = True
        elif kind == wire.LEAVING:
            peer.takes_trials, peer.is_leaving = False, True
        elif kind == wire.ENDED:
            lease = message["lease"]
            job = peer.jobs.pop(lease, None)
            if job is None:
                self._send(peer, wire.DROP, lease=lease)
                return
            yield Ended(job, message["status"], message["log"], message["seconds"])
            self._send(peer, wire.NOTED, lease=lease)  # the chief has written it before it asks for the next

    def _greet(self, session: int, hello: dict[str, Any], at: float) -> Iterator[Ended[Job]]:
        problem = self._problem(hello)
        if problem is not None:
            self._server.send(session, {"kind": wire.REFUSED, "message": problem})
            self._server.send(session, None)
            return
        peer = self._peers.get(hello["worker"])
        if peer is None:
            peer = _Peer(hello["name"], self._next_number, hello["places"], session, at)
            self._peers[hello["worker"]] = peer
            self._next_number += peer.places
        elif peer.session is not None:
            self._server.send(peer.session, None)
        peer.session, peer.heard, peer.takes_trials = session, at, False
        held = {each["lease"]: each for each in hello["held"]}
        for lease in [lease for lease in peer.jobs if lease not in held]:  # the start did not reach it
            yield Ended(peer.jobs.pop(lease), EXIT_PREEMPTED, "", 0.0)
        for lease, each in held.items():
            vacant = peer.vacant
            if lease not in peer.jobs and vacant:
                job = self._claim(each["key"], TrialSettings.from_message(each), vacant[0])
                if job is not None:
                    job.worker, job.started = vacant[0].number, time.monotonic()
                    peer.jobs[lease] = job
        treaty = self._treaty
        self._send(peer, wire.WELCOME, lease_seconds=treaty.lease_seconds, mark=treaty.mark, kept=list(peer.jobs))
        for job in peer.jobs.values():
            if job.run.stop_asked:  # perhaps before it could hear it
                self.stop(job)
        if self._over is not None:
            self._send(peer, wire.OVER, **self._over)

    def _problem(self, hello: Mapping[str, Any]) -> str | None:
        """Why a worker cannot take part."""
        ours, theirs = from_json(to_json(self._treaty.identity)), hello["identity"]
        differing = [name for name in ours if ours[name] != theirs.get(name)]
        if not differing:
            return None
        shown = [
            f"    the {name}: "
            + ("its settings differ" if name == "configuration" else f"there {ours[name]}, here {theirs.get(name)}")
            for name in differing
        ]
        return "\n".join(
            ["The chief leads another sweep than this worker was started for.", *shown, "Give both the same gin files."]
        )

    def _lapsed(self, now: float) -> Iterator[Ended[Job]]:
        """Takes leave of the workers that were not heard from for too long."""
        limit = self._treaty.lease_seconds
        for worker, peer in list(self._peers.items()):
            if now - peer.heard > limit:
                what = f"{peer.name} was not heard from for {limit:g} s"
            elif peer.session is None and now - peer.cut_at > BROKEN_SECONDS:
                what = f"the connection to {peer.name} broke, and it did not come back"
            else:
                continue
            del self._peers[worker]
            if peer.jobs or (peer.has_joined and not peer.is_leaving):
                self._notify(what + ("; its trials are queued again" if peer.jobs else ""))
            if peer.session is not None:
                self._server.send(peer.session, None)
            for job in peer.jobs.values():
                yield Ended(job, EXIT_PREEMPTED, "", now - job.started, lost=what)

    def _remind(self) -> None:
        now = time.monotonic()
        if any(peer.session is not None for peer in self._peers.values()):
            self._lonely_since, self._reminder_seconds = now, FIRST_REMINDER_SECONDS
        elif now - self._lonely_since > self._reminder_seconds:
            self._lonely_since, self._reminder_seconds = now, LATER_REMINDER_SECONDS
            self._notify("no other machine has joined the sweep; is --mode=tune started there?")
