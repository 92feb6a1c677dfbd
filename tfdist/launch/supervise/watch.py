"""Watches the workers of one start: the first failure ends the others, a signal to the launcher reaches all.

Invariant: `Watch.run` returns only when every worker has ended, and names the one whose failure was the cause. A worker
that merely lost its peers (status 4, or the SIGABRT with which TensorFlow answers a dead peer) is not taken for the
cause while another may be; nor is one that ended because it was told to. A worker that hangs is a failure like one
that died, where hangs are to end a start.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tfdist.errors import (
    EXIT_BUG,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_NOT_SAVED,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
    EXIT_STORE_UNAVAILABLE,
    EXIT_USER_ERROR,
    UserError,
)
from tfdist.launch.processes import Worker
from tfdist.launch.supervise import stacks
from tfdist.launch.supervise.hangs import (
    MAX_NAMED,
    OUT_OF_TURN,
    Deadlines,
    Hang,
    Vital,
    Watcher,
    find_missing,
    find_stalled,
    read_vitals,
)
from tfdist.launch.supervise.signals import ENDING, recording_profile_signal
from tfdist.telemetry import heartbeat

POLL_SECONDS = 0.05
LOOK_SECONDS = 0.25
PEER_LOST = (EXIT_PEER_LOST, 128 + signal.SIGABRT)
ENDED_ON_REQUEST = (EXIT_PREEMPTED, EXIT_NOT_SAVED, 128 + signal.SIGINT)
LEFT = (EXIT_PREEMPTED, EXIT_NOT_SAVED)  # because the worker itself was told to
FATAL = (EXIT_USER_ERROR, EXIT_DIVERGED)  # no worker ends like this because of a signal or a lost peer


SETTLE_SECONDS = 2.0  # for the cause, when a worker lost its peers
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL to the survivors of a failure
STUCK_SECONDS = 1.0  # the same for one that does not clean up: it sits in a collective, or has ended but for libraries
STORING_SECONDS = 60.0  # the same for one that is writing a checkpoint
SAVE_SECONDS = 300.0  # for the others to save, after the first worker ended as it was asked to, or was preempted


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a worker.

    Attributes:
      was_signaled: after this launcher had signalled it because of another's failure.
      cause: the worker whose failure it ended with, by its own word.
      error_id: of the error it ended with, by its own word.
    """

    worker: int
    status: int
    sweep: int
    was_signaled: bool
    cause: int | None = None
    error_id: str | None = None

    @property
    def is_symptom(self) -> bool:
        return self.status in PEER_LOST or self.cause is not None


@dataclasses.dataclass
class StartOutcome:
    """The outcome of a start.

    Attributes:
      status: of the whole, when all workers have ended.
      worker: the one that it comes from; None when all is well.
      hang: if that was the failure.
      error_id: of the error, where a worker left one.
      vital: of `worker`, when it was last seen.
      step: the last one that any worker has done; None where none showed one.
      exit_info: what the workers left for the launcher.
      was_interrupted: the launcher, or a worker, received a signal to end, and the workers were asked to save.
      first_signal: that the launcher received; None where none came.
      noticed: when the failure was, by `time.monotonic`.
      left_hosts: the workers were asked to save and end because the hosts have changed.

    A worker that lost its peers, or one of several that may hang, stands in `worker` although it may not be the cause:
    then `is_certain` is False.
    """

    status: int = EXIT_DONE
    worker: int | None = None
    hang: Hang | None = None
    error_id: str | None = None
    vital: Vital | None = None
    step: int | None = None
    exit_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    was_interrupted: bool = False
    first_signal: int | None = None
    noticed: float = 0.0
    left_hosts: bool = False

    @property
    def is_certain(self) -> bool:
        if self.hang is not None:
            return len(self.hang.suspects) == 1
        return self.worker is not None and self.status not in PEER_LOST


def find_root_cause(endings: Sequence[Ending]) -> Ending | None:
    """The ending that the others follow from; None when nobody failed."""
    failures = [e for e in endings if e.status != EXIT_DONE]
    own = [e for e in failures if not e.was_signaled or e.status in FATAL]
    if all(e.status in PEER_LOST for e in own):
        own += [e for e in failures if e.was_signaled and e.status == EXIT_BUG]
    return min(own or failures, key=_order_of_blame, default=None)


def _order_of_blame(ending: Ending) -> tuple[bool, bool, int, bool, int]:
    was_asked = ending.status in ENDED_ON_REQUEST
    return ending.is_symptom, was_asked, ending.sweep, ending.status not in FATAL, ending.worker


MEANINGS = {
    EXIT_PEER_LOST: "lost another worker",
    EXIT_PREEMPTED: "preempted, or SIGTERM",
    EXIT_NOT_SAVED: "told to leave, and could not save",
    EXIT_STORE_UNAVAILABLE: "a store does not answer",
}


def describe(status: int) -> str:
    """A status in words: "status 2", "status 137 (SIGKILL)"."""
    meaning = MEANINGS.get(status)
    if meaning is None and 128 < status < 128 + signal.NSIG and status - 128 in set(signal.Signals):
        meaning = signal.Signals(status - 128).name
    return f"status {status}" + (f" ({meaning})" if meaning else "")


@dataclasses.dataclass
class Watch:
    """The supervision of one start.

    Attributes:
      signals: received by the launcher, see `signals.py`. SIGINT and SIGHUP are passed on as SIGTERM, others as they
        are; SIGINT behind any of them kills.
      report: is called what is done and why.
      have_hosts_changed: whether the workers are to save and end, for others to continue.
    """

    workers: Sequence[Worker]
    signals: collections.deque[int]
    report: Callable[[str], None]
    deadlines: Deadlines
    have_hosts_changed: Callable[[], bool]

    def __post_init__(self) -> None:
        self.running = list(self.workers)
        self.endings: list[Ending] = []
        self.sweep = 0
        self.outcome = StartOutcome()
        self.is_ending = False  # the survivors of a failure were told to end
        self.killed: set[int] = set()
        self.watcher = Watcher(self.deadlines)
        self.last_look = -math.inf
        self.seen: dict[int, Vital] = {}
        self.reported: set[int] = set()  # who was said to hang
        self.to_store: Callable[[str], str | None] | None = None
        self.end_at = self.kill_at = self.ended_at = math.inf

    def run(self) -> StartOutcome:
        """Supervises the workers until all have ended."""
        with recording_profile_signal() as profiles:
            while self.running:
                self._pass_on_signals()
                if profiles:
                    profiles.clear()
                    self._request_profiles()
                if not (self.outcome.was_interrupted or self.is_ending) and self.have_hosts_changed():
                    self._end_for_new_hosts()
                self._collect()
                self._check_for_hang(time.monotonic())
                self._act(time.monotonic())
                if self.running:
                    time.sleep(POLL_SECONDS)
        outcome, cause = self.outcome, find_root_cause(self.endings)
        if cause is not None:  # it may name another worker, which was ended before it ended by itself
            outcome.status, outcome.worker = cause.status, cause.worker if cause.cause is None else cause.cause
        if outcome.hang is not None:
            outcome.status, outcome.worker = EXIT_PEER_LOST, outcome.hang.suspects[0].worker
        self._see(self.workers)
        outcome.vital = None if outcome.worker is None else self.seen.get(outcome.worker)
        outcome.step = max((vital.step for vital in self.seen.values() if vital.step is not None), default=None)
        outcome.error_id = None if cause is None or outcome.hang is not None else cause.error_id
        outcome.exit_info = self._exit_info()
        return outcome

    def _see(self, workers: Sequence[Worker]) -> list[Vital]:
        vitals = read_vitals(workers)
        self.seen |= {vital.worker: vital for vital in vitals}
        return vitals

    def _check_for_hang(self, now: float) -> None:
        """Checks now and then whether a worker hangs; reports the hang, and may end it."""
        if now - self.last_look < LOOK_SECONDS or self.is_ending or not self.running:
            return
        self.last_look = now
        hang = self.watcher.find(self._see(self.running), now)
        if hang is None:
            if self.reported:
                self.report(f"{_name_workers([w for w in self.workers if w.index in self.reported])} continued.")
                self.reported.clear()
            return
        if not {vital.worker for vital in hang.suspects} & self.reported:
            hang = self._report_hang(hang, now)
        if self.deadlines.end_hangs and not self.outcome.was_interrupted:
            self._end_hang(hang, now)
        else:
            self._store_stacks()

    def _report_hang(self, hang: Hang, now: float) -> Hang:
        """Reports a hang with the suspects' stacks; returns it with fewer suspects if the stacks show who is stuck."""
        vitals = read_vitals(self.running)
        shown = stacks.collect_stacks(self.running, vitals)
        if len(hang.suspects) > 1:
            stuck = tuple(v for v in hang.suspects if stacks.is_input_blocked(shown.get(v.worker, "")))
            if 0 < len(stuck) < len(hang.suspects):
                hang = Hang(stuck, f"its input pipeline is stuck in Python code: {hang.why}")
        named = " or ".join(vital.name for vital in hang.suspects)
        who = f"{named} hangs: {hang.why}; {hang.suspects[0].describe_position(now)}."
        if len(hang.suspects) > 1:
            who = f"The workers hang, and which of them it comes from cannot be told ({named}): {hang.why}."
        self.report(who)
        self.reported |= {vital.worker for vital in hang.suspects}
        suspects = [vital.worker for vital in hang.suspects]
        self._show_stacks(suspects[0], vitals, shown, suspects, now)
        return hang

    def _end_hang(self, hang: Hang, now: float) -> None:
        self.outcome.hang, self.outcome.noticed = hang, now
        for worker in self.running:
            if worker.index == self.outcome.hang.suspects[0].worker:
                worker.send(signal.SIGKILL)  # a stopped process hears nothing else
        self._end_survivors(now)

    def _pass_on_signals(self) -> None:
        while self.signals:
            number = self.signals.popleft()
            if number == signal.SIGINT and self.outcome.first_signal is not None:
                self.report("Killing the workers.")
                self._send_all(signal.SIGKILL)
            else:
                passed = signal.SIGTERM if number in ENDING else signal.Signals(number)
                why = "" if passed == number else f"{signal.Signals(number).name} was received. "
                what = " Another Ctrl-C kills them." if number == signal.SIGINT else ""
                self.report(f"{why}Passing {passed.name} on to the workers.{what}")
                self._send_all(passed)
                self.outcome.first_signal = self.outcome.first_signal or number
            self.outcome.was_interrupted = True

    def _end_for_new_hosts(self) -> None:
        self.report("The hosts have changed. The workers save and end, to continue on those that there are now.")
        self._send_all(signal.SIGTERM)
        self.outcome.was_interrupted = self.outcome.left_hosts = True
        self.kill_at = time.monotonic() + SAVE_SECONDS

    def _request_profiles(self) -> None:
        name = heartbeat.PROFILE_SIGNAL.name
        self.report(f"Passing {name} on to the workers: those that train take a profile of their next steps.")
        for worker in self.running:
            if heartbeat.read(worker.heartbeat) is not None:  # else it may not be ready for a signal
                worker.send(heartbeat.PROFILE_SIGNAL)

    def _collect(self) -> None:
        self.sweep += 1
        for worker in list(self.running):
            status = worker.poll()
            if status is not None:
                self.running.remove(worker)
                info = heartbeat.read_exit_info(worker.heartbeat)
                named = info.get("failed_worker"), info.get("error_id")
                self.endings.append(Ending(worker.index, status, self.sweep, self.is_ending, *named))
                if status != EXIT_DONE and not self.is_ending:
                    self.outcome.noticed = self.outcome.noticed or time.monotonic()
                    self._plan_after(self.endings[-1])

    def _plan_after(self, ending: Ending) -> None:
        """Decides what a worker's failure means for the others."""
        now = time.monotonic()
        if self.outcome.was_interrupted and ending.status in ENDED_ON_REQUEST + PEER_LOST:
            self.kill_at = min(self.kill_at, now + SAVE_SECONDS)
            return
        if ending.status in LEFT and self.running:
            how = describe(ending.status)
            self.report(f"worker {ending.worker} ended with {how}; asking the others to save and end.")
            self._send_all(signal.SIGTERM)
            self.outcome.was_interrupted = True
            self.kill_at = now + SAVE_SECONDS
            return
        settle = SETTLE_SECONDS if ending.is_symptom else 0.0
        self.end_at = min(self.end_at, now + settle)

    def _act(self, now: float) -> None:
        if now >= self.end_at + self._cause_seconds() and not self.is_ending:
            self._end_survivors(now)
        if now >= self.kill_at and self.running:
            self._kill(self.running)
            self.kill_at = math.inf
        if self.is_ending:
            self._kill([w for w in self.running if now >= self.ended_at + self._grace(w)])

    def _cause_seconds(self) -> float:
        """For how much longer the cause may show itself: a worker leaves after an error, while others only lost it."""
        cause = find_root_cause(self.endings)
        if cause is None or cause.status not in PEER_LOST:
            return 0.0
        readings = [heartbeat.read(worker.heartbeat) for worker in self.running]
        is_leaving = any(reading is not None and reading.phase in OUT_OF_TURN for reading in readings)
        return GRACE_SECONDS if is_leaving else 0.0

    def _grace(self, worker: Worker) -> float:
        """For how long to let a survivor of a failure continue."""
        reading = heartbeat.read(worker.heartbeat)
        if reading is None:
            return GRACE_SECONDS
        if reading.is_storing:
            return STORING_SECONDS
        return GRACE_SECONDS if reading.phase == heartbeat.LEAVING else STUCK_SECONDS

    def _kill(self, workers: Sequence[Worker]) -> None:
        late = [worker for worker in workers if worker.index not in self.killed]
        if late:
            self.report(f"Killing {_name_workers(late)}: not ended by SIGTERM in time.")
        for worker in late:
            self.killed.add(worker.index)
            worker.send(signal.SIGKILL)

    def _end_survivors(self, now: float) -> None:
        cause = find_root_cause(self.endings)
        if self.outcome.hang is None and cause and self.running:
            self._report_failure(cause, now)
        self.is_ending = True
        self.ended_at, self.kill_at = time.monotonic(), math.inf
        self._send_all(signal.SIGTERM)
        self._store_stacks()  # which may take its time on gs://

    def _report_failure(self, cause: Ending, now: float) -> None:
        """Says who failed, and where all were when a worker was lost without a word of its own."""
        vitals = self._see(self.running)
        dead = read_vitals([worker for worker in self.workers if worker.index == cause.worker])[0]
        self.seen[cause.worker] = dead
        missing = find_missing(vitals) if cause.status in PEER_LOST else None
        if missing is not None:
            self.outcome.hang = missing
            worker = next(worker for worker in self.running if worker.index == missing.suspects[0].worker)
            self.report(
                f"{missing.suspects[0].name} is lost: {missing.why}; {missing.suspects[0].describe_position(now)}."
            )
        where = f" ({dead.describe_position(now)})" if dead.reading else ""
        self.report(f"{dead.name}{where} ended with {describe(cause.status)}; ending {_name_workers(self.running)}.")
        if cause.status >= 128 or cause.status in PEER_LOST:
            stalled = {v.worker for v in (*find_stalled([*vitals, dead], now), *(missing.suspects if missing else ()))}
            self._show_stacks(cause.worker, vitals, stacks.collect_stacks(self.running, vitals), stalled, now)
        if missing is not None:
            worker.send(signal.SIGKILL)

    def _show_stacks(
        self, cause: int, vitals: Sequence[Vital], shown: Mapping[int, str], stalled: Collection[int], now: float
    ) -> None:
        """Reports where each worker is, with the stacks of stalled ones; keeps all for `_store_stacks`."""
        if any(vital.reading for vital in vitals):
            self.report(stacks.format_stacks(vitals, shown, stalled=stalled, now=now))
            self.to_store = functools.partial(stacks.store, cause=cause, vitals=vitals, stacks=shown, now=now)

    def _store_stacks(self) -> None:
        """Leaves the stacks that were shown last in the run directory, once."""
        store, self.to_store = self.to_store, None
        run_dir = self._exit_info().get("run_dir")
        if store is None or run_dir is None:
            return
        try:
            if path := store(run_dir):
                self.report(f"The stacks of all running workers: {path}")
        except (OSError, UserError) as error:
            self.report(f"The workers' stacks could not be written to {run_dir}: {error}")

    def _exit_info(self) -> dict[str, Any]:
        """Reads what the workers left for the launcher; of several values that of the first worker."""
        info: dict[str, Any] = {}
        for worker in self.workers[::-1]:
            info |= heartbeat.read_exit_info(worker.heartbeat)
        return info

    def _send_all(self, signal_number: int) -> None:
        for worker in self.running:
            worker.send(signal_number)


def _name_workers(workers: Sequence[Worker]) -> str:
    more = [f"{len(workers) - MAX_NAMED:,} more"] if len(workers) > MAX_NAMED else []
    return ", ".join([*(f"worker {worker.index}" for worker in workers[:MAX_NAMED]), *more])
