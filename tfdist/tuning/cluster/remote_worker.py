"""A worker of a sweep over a cluster: runs the trials that the chief gives it, each for as long as it has its lease.

Invariant: of what the chief says only values that the worker's own space allows reach a configuration, and only names
of trials a path. No process trains a trial whose lease may have ended. A lease holds for `lease_seconds` from when a
message was sent that the chief answered; after half of that without an answer the trials save and leave, at its end
they are killed. What a trial came to is told until the chief has noted it. Messages are those of `wire.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import select
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.errors import EXIT_DONE, EXIT_PREEMPTED, EXIT_USER_ERROR, PeerLostError, TfdistError, UserError
from tfdist.storage import files
from tfdist.storage.contents import FileVersion
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.cluster import wire
from tfdist.tuning.cluster.chief_link import ChiefLink
from tfdist.tuning.cluster.role import Role
from tfdist.tuning.report.words import count_text
from tfdist.tuning.schedule.signals import Leaving
from tfdist.tuning.schedule.waking import open_waking
from tfdist.tuning.schedule.workers import Ended, Workers, key_of
from tfdist.tuning.search.space import Space
from tfdist.tuning.search.trial_settings import TrialSettings

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 10.0  # between two attempts to connect, doubled from one to the next
ANSWER_SECONDS = 10.0  # for the chief to answer a hello
RENEWALS = 6  # in the time of a lease
SHARED_SECONDS = 10.0  # for the chief's mark to appear in the run directory
WAIT_SECONDS = 0.5
FIRST_WORD_SECONDS, NEXT_WORD_SECONDS = 3.0, 30.0  # without the chief, before saying so


class SweepFailedError(TfdistError):
    """The chief has ended the sweep, with this status."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclasses.dataclass
class _Leased:
    """A run that this worker has, or whose end the chief has not noted yet."""

    lease: str
    directory: RunDirectory
    settings: TrialSettings
    worker: int = 0
    log: str = ""
    started: float = 0.0
    memory_kills: int = 0
    is_saving: bool = False  # it was told to save and leave for want of a lease
    is_cut: bool = False  # and killed
    end: dict[str, Any] | None = None


class RemoteWorker:
    """One process of `--mode=tune` that is not the chief.

    Args:
      role: which worker this is.
      workers: its places.
      run_dir: of the sweep, shared with the chief.
      space: of the sweep.
      seed: `train.seed` of the configuration.
      identity: of the sweep.
      patience_seconds: how long to look for the chief.
      notify: takes what the user should know.
    """

    def __init__(
        self,
        role: Role,
        workers: Workers[_Leased],
        *,
        run_dir: str,
        space: Space,
        seed: int,
        identity: Mapping[str, Any],
        patience_seconds: float,
        notify: Callable[[str], None],
    ) -> None:
        self._role, self._workers, self._notify = role, workers, notify
        self._directory = RunDirectory(run_dir)
        self._space, self._seed, self._identity = space, seed, identity
        self._patience_seconds = patience_seconds
        self._me = uuid.uuid4().hex
        self._closing = contextlib.ExitStack()
        self._woken, wake = open_waking(self._closing)
        self._link = ChiefLink(role.address, secret=role.secret, wake=wake)
        self._leased: dict[str, _Leased] = {}
        self._to_start: list[_Leased] = []  # once an earlier process of the same run has ended
        self._leaving = Leaving()
        self._has_said_leaving = False
        self._over: dict[str, Any] | None = None
        self._num_run = 0
        now = time.monotonic()
        self._heard, self._held_since = now, now
        self._hello_sent: float | None = None  # and not answered yet
        self._is_welcome = False
        self._has_joined = False
        self._result_before: FileVersion | None = None
        self._next_attempt, self._pause_seconds = now, FIRST_PAUSE_SECONDS
        self._next_word = now + FIRST_WORD_SECONDS
        self._trouble = "it does not answer"
        self._lease_seconds = float("inf")
        self._next_renewal = float("inf")
        self._renewals: dict[int, float] = {}  # when they were sent, of those not answered yet
        self._num_renewals = 0

    def run(self) -> None:
        """Until the sweep has ended.

        Raises:
          PeerLostError: the chief could not be reached for too long.
          UserError: the chief refuses this worker, or does not share its directory.
          SweepFailedError: the chief has ended the sweep for a reason.
          PreemptedError: this process was told to leave; its trials have saved.
        """
        try:
            with self._leaving.noting():
                while self._over is None:
                    self._connect()
                    self._wait()
                    for news in self._link.take():
                        self._hear(news)
                    for ended in self._workers.ended():
                        self._process_ended(ended)
                    self._renew()
                    self._watch_leases()
                    self._leave_if_told()
        finally:
            self._link.close()
            self._closing.close()
        if self._over["status"] != EXIT_DONE:
            raise SweepFailedError(self._over["message"], self._over["status"])
        self._notify(f"{self._over['message']}; {count_text(self._num_run, 'training')} ran here")

    # The connection

    def _connect(self) -> None:
        now = time.monotonic()
        if self._is_welcome:
            return
        if self._hello_sent is not None:
            if now - self._hello_sent > min(ANSWER_SECONDS, self._lease_seconds / 4):
                self._broken("it does not answer")
            return
        if now - self._heard > self._patience_seconds:
            raise PeerLostError(
                f"{self._role.name} could not reach the sweep's chief at {self._role.address} for "
                f"{self._patience_seconds:g} s and gives up: {self._trouble}. Is it started, and is "
                f"{self._role.source} the same on every machine?"
            )
        if now >= self._next_attempt:
            self._hello_sent = now
            held = [
                {"lease": each.lease, "key": key_of(each), **each.settings.to_message()}
                for each in self._leased.values()
            ]
            self._link.connect(
                {
                    "kind": wire.HELLO,
                    "worker": self._me,
                    "name": self._role.name,
                    "places": self._workers.num_places,
                    "identity": self._identity,
                    "held": held,
                }
            )
            self._renewals = {}

    def _broken(self, reason: str) -> None:
        self._link.close()
        now = time.monotonic()
        if self._is_welcome:
            self._notify(f"the connection to the sweep's chief at {self._role.address} is gone: {reason}")
            self._pause_seconds, self._next_word = FIRST_PAUSE_SECONDS, now + FIRST_WORD_SECONDS
        self._is_welcome, self._hello_sent, self._trouble = False, None, reason
        self._next_attempt = now + self._pause_seconds * random.uniform(0.5, 1.0)  # not all workers at once
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        if now >= self._next_word:
            self._next_word = now + NEXT_WORD_SECONDS
            self._notify(f"waiting for the sweep's chief at {self._role.address}: {reason}")
        if self._has_joined and _version(self._directory.result) != self._result_before:
            self._over = {"status": EXIT_DONE, "message": "the sweep has ended"}

    def _wait(self) -> None:
        until = min(self._next_renewal if self._is_welcome else self._next_attempt, time.monotonic() + WAIT_SECONDS)
        seconds = max(0.0, until - time.monotonic()) if self._hello_sent is None or self._is_welcome else WAIT_SECONDS
        waited: list[Any] = [self._workers, self._woken]
        if self._woken in select.select(waited, [], [], seconds)[0]:
            os.read(self._woken, 1 << 12)

    # What the chief says

    def _hear(self, news: dict[str, Any] | str) -> None:
        if isinstance(news, str):
            self._broken(news)
            return
        self._heard = time.monotonic()
        match news["kind"]:
            case wire.WELCOME:
                self._welcome(news)
            case wire.REFUSED:
                raise UserError(news["message"])
            case wire.RENEWED:
                self._held_since = max(self._held_since, self._renewals.pop(news["number"], 0.0))
            case wire.START:
                self._start(news["lease"], news["key"], TrialSettings.from_message(news))
            case wire.STOP if (leased := self._leased.get(news["lease"])) is not None:
                self._workers.stop(leased)
            case wire.DROP:
                self._drop(news["lease"])
            case wire.NOTED:
                self._leased.pop(news["lease"], None)
            case wire.OVER:
                self._over = news

    def _welcome(self, news: Mapping[str, Any]) -> None:
        if not self._has_joined:
            self._check_shared(news["mark"])
            self._result_before = _version(self._directory.result)
            self._has_joined = True
        self._notify(f"joined the sweep of {self._role.address}: {self._directory.path}")
        self._lease_seconds = news["lease_seconds"]
        self._held_since, self._hello_sent = self._hello_sent or self._heard, None
        self._is_welcome, self._next_renewal = True, self._heard
        for lease in set(self._leased) - set(news["kept"]):
            self._drop(lease)
        for leased in self._leased.values():
            if leased.end is not None:
                self._link.send(leased.end)
        self._link.send({"kind": wire.LEAVING if self._has_said_leaving else wire.READY})

    def _check_shared(self, mark: str) -> None:
        give_up = time.monotonic() + SHARED_SECONDS
        while not (is_shared := _content(self._directory.sweep_mark) == mark) and time.monotonic() < give_up:
            time.sleep(WAIT_SECONDS)
        if not is_shared:
            raise UserError(
                f"The run directory {self._directory.path} is not that of the chief at {self._role.address}: all "
                "machines of a sweep share one. Give --run_dir=gs://BUCKET/DIRECTORY, or a directory of a file "
                "system that all of them have, as each of them sees it."
            )
        self._directory.create()

    def _start(self, lease: str, key: str, settings: TrialSettings) -> None:
        directory = RunDirectory(files.join(self._directory.path, "trials", key))
        leased = self._leased[lease] = _Leased(lease, directory, settings)
        try:
            leased.settings = settings.checked(self._space)
        except UserError as error:
            self._notify(f"trial {key} is not started: {error}")
            self._tell_end(leased, EXIT_USER_ERROR, f"error: {error}", 0.0)
            return
        self._to_start.append(leased)
        self._start_what_can_be()

    def _start_what_can_be(self) -> None:
        """Starts what waits; of a run only one process at a time."""
        for leased in [each for each in self._to_start if key_of(each) not in map(key_of, self._workers.running)]:
            self._to_start.remove(leased)
            if self._leased.get(leased.lease) is not leased:
                continue
            if self._leaving.is_told or not self._workers.num_free:
                self._tell_end(leased, EXIT_PREEMPTED, "", 0.0)
                continue
            self._num_run += 1
            parameters = leased.settings.statements(self._space, seed=self._seed)
            self._notify(f"trial {key_of(leased)} begins: {', '.join(parameters)}")
            self._workers.start(leased, parameters)

    def _drop(self, lease: str) -> None:
        leased = self._leased.pop(lease, None)
        if leased is None:
            return
        if leased.end is not None:
            self._notify(f"trial {key_of(leased)}: what it came to here does not count, since its lease was lost")
            return
        self._notify(f"trial {key_of(leased)} ends here, since its lease was lost")
        self._workers.kill(leased)

    # What became of the trials

    def _process_ended(self, ended: Ended[_Leased]) -> None:
        leased = ended.job
        self._start_what_can_be()
        if self._leased.get(leased.lease) is not leased:
            return  # dropped
        status = EXIT_PREEMPTED if leased.is_cut else ended.status
        self._notify(f"trial {key_of(leased)} ends with status {ended.status} after {ended.seconds:.1f} s")
        self._tell_end(leased, status, ended.log, ended.seconds)

    def _tell_end(self, leased: _Leased, status: int, log: str, seconds: float) -> None:
        leased.end = {"kind": wire.ENDED, "lease": leased.lease, "status": status, "log": log, "seconds": seconds}
        if self._is_welcome:
            self._link.send(leased.end)

    # The lease

    def _renew(self) -> None:
        now = time.monotonic()
        if self._is_welcome and now >= self._next_renewal:
            self._next_renewal = now + self._lease_seconds / RENEWALS
            self._num_renewals += 1
            self._renewals[self._num_renewals] = now
            self._link.send({"kind": wire.RENEW, "number": self._num_renewals})

    def _watch_leases(self) -> None:
        age = time.monotonic() - self._held_since
        if age < self._lease_seconds / 2:
            return
        if self._is_welcome:
            self._broken("it does not answer")
        for leased in self._workers.running:
            if age > self._lease_seconds:
                leased.is_cut = True
                self._workers.kill(leased)
            elif not leased.is_saving:
                leased.is_saving = True
                self._notify(f"trial {key_of(leased)} saves and ends: its lease cannot be renewed")
                self._workers.stop(leased)

    def _leave_if_told(self) -> None:
        if not self._leaving.is_told:
            return
        if not self._has_said_leaving:
            self._has_said_leaving = True
            self._link.send({"kind": wire.LEAVING})
            for leased in self._workers.running:
                self._workers.stop(leased)
        if not self._workers.running and not (self._is_welcome and self._leased):
            self._leaving.leave_if_told(
                "Left the sweep after its trials here had saved; other workers continue with them."
            )


def _version(path: str) -> FileVersion | None:
    try:
        return files.stat(path)
    except OSError:
        return None


def _content(path: str) -> str | None:
    try:
        return files.read(path).decode()
    except OSError:
        return None
