"""Starts the workers, and starts them again after a failure that another start may mend.

Invariant: at any time there is one start at most; the next one begins when nothing of the last is left. A run continues
from its newest checkpoint by itself, so a start knows nothing of those before it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tfdist.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, UserError
from tfdist.launch.plan import Plan, Slot, host_of
from tfdist.launch.processes import Worker
from tfdist.launch.supervise.hangs import Deadlines
from tfdist.launch.supervise.output import Output
from tfdist.launch.supervise.restarts import GiveUp, Restart, Restarts
from tfdist.launch.supervise.watch import FATAL, POLL_SECONDS, StartOutcome, Watch, describe

if TYPE_CHECKING:
    from tfdist.telemetry.facts import Level


@dataclasses.dataclass
class WorkerSlots:
    """The slots that a run may use: those that are listed, but for those that fail or were taken away.

    Attributes:
      find_slots: gives the slots that are listed now, those of a host side by side.
      min_workers: for a start.
      max_workers: of a start; None is as many as there are.
      is_fixed: nobody else has a say in the listing, which is of this machine.
      barred: slots whose workers fail again and again.
      withdrawn: slots whose workers were told to leave; until the listing changes.
    """

    find_slots: Callable[[], Sequence[Slot]]
    min_workers: int = 1
    max_workers: int | None = None
    is_fixed: bool = False
    barred: frozenset[Slot] = frozenset()
    withdrawn: set[Slot] = dataclasses.field(default_factory=set)
    _listed: Sequence[Slot] = ()
    _taken: tuple[Slot, ...] = ()

    def take(self) -> tuple[Slot, ...]:
        """The slots for a start; empty where there are too few."""
        slots = self._choose()
        if len(slots) >= self.min_workers:
            self._taken = slots
            return slots
        return ()

    def have_changed(self) -> bool:
        """Whether a start should have other slots than the last one has."""
        return not self.is_fixed and self._choose() != self._taken

    def describe(self) -> str:
        """Formats how many slots there are, and how many are wanted."""
        return f"{len(self._choose())} can be used, at least {self.min_workers} are wanted"

    def _choose(self) -> tuple[Slot, ...]:
        listed = list(self.find_slots())
        if listed != self._listed:
            self._listed = listed
            self.withdrawn.clear()
        free = [slot for slot in listed if slot not in self.barred and slot not in self.withdrawn]
        if self.is_fixed:
            return tuple(free)
        kept = [slot for slot in self._taken if slot in free]  # worker 0 stays worker 0
        chosen = [*kept, *(slot for slot in free if slot not in kept)][: self.max_workers]
        hosts = list(dict.fromkeys(map(host_of, chosen)))
        return tuple(sorted(chosen, key=lambda slot: hosts.index(host_of(slot))))


@dataclasses.dataclass
class LaunchJournal:
    """Journal of a supervisor in its run's events.jsonl: failures, restarts, waiting, giving up.

    Invariant: it writes only while none of its workers runs, and to a file of its own if worker 0 is none of them, so
    that on gs:// too, where a log is rewritten whole, nobody writes at the same time; and never into a directory that
    the run itself has not made. What cannot be stored is said and kept for the next time.
    """

    report: Callable[[str], None]
    worker: int = 0  # the first of those that are supervised
    run_dir: str | None = None
    _lines: list[str] = dataclasses.field(default_factory=list)

    def log(
        self, level: Level, event: str, *, worker: int | None = None, step: int | None = None, **details: object
    ) -> None:
        """Writes an event of this moment, behind those that could not be written before."""
        from tfdist.storage import files
        from tfdist.telemetry.events import event_line
        from tfdist.telemetry.facts import Event
        from tfdist.telemetry.run_directory import RunDirectory

        self._lines.append(event_line(Event(name=event, level=level, worker=worker, step=step, details=details)))
        try:
            if self.run_dir is None or not files.is_dir(self.run_dir):
                return
            with contextlib.closing(files.open_log(RunDirectory(self.run_dir).worker_events(self.worker))) as log:
                for line in self._lines:
                    log.write_line(line)
            self._lines.clear()
        except (OSError, UserError) as error:
            self.report(f"The events of {self.run_dir} could not be written: {error}")


Start = Callable[[Plan, Output], contextlib.AbstractContextManager[Sequence[Worker]]]


HOSTS_WORD_SECONDS = 60.0  # between two lines that say that hosts are missing


@dataclasses.dataclass
class Supervisor:
    """Runs the workers to the end of the run.

    Attributes:
      plan: of the first start.
      start: one of the launchers.
      output: where all that is said goes.
      signals: received by the launcher, see `Watch`.
      deadlines: of the workers.
      restarts: decides whether, and how, to start again.
      slots: for the workers.
    """

    plan: Plan
    start: Start
    output: Output
    signals: collections.deque[int]
    deadlines: Deadlines
    restarts: Restarts
    slots: WorkerSlots

    def __post_init__(self) -> None:
        self.journal = LaunchJournal(self.output.report, worker=self.plan.first_index)

    def run(self) -> int:
        """Starts the workers as often as it takes; returns the exit status."""
        again: Restart | None = None
        while True:
            if self.signals:
                return self._leave()
            if (status := self._wait_for_slots()) is not None:
                return status
            if again is not None:
                self.journal.log(
                    "info",
                    "restarted",
                    step=self.restarts.newest_step,
                    restart=again.number,
                    num_workers=len(self.plan.slots),
                    places=self.plan.slot_numbers,
                )
            with self.start(self.plan, self.output) as workers:
                watch = Watch(workers, self.signals, self.output.report, self.deadlines, self.slots.have_changed)
                outcome = watch.run()
            again = None
            report_outcome(outcome, self.output)
            self.journal.run_dir = outcome.exit_info.get("run_dir", self.journal.run_dir)
            if self._continues_elsewhere(outcome):
                continue
            has_left = outcome.exit_info.get("left_after_saving") or outcome.exit_info.get("left_unsaved")
            left = outcome.was_interrupted or has_left
            decision: Restart | GiveUp = GiveUp() if left or not outcome.status else self._decide(outcome)
            if isinstance(decision, GiveUp):
                self._end(decision)
                return _status_of(outcome)
            again = decision
            if (status := self._wait_for_restart(again, outcome.noticed)) is not None:
                return status

    def _wait_for_slots(self) -> int | None:
        """Waits for free slots and plans the next start on them; returns an exit status if a signal ends the run."""
        reported_at = float("-inf")
        while not (slots := self.slots.take()):
            if (status := self._pause()) is not None:
                return status
            if time.monotonic() - reported_at >= HOSTS_WORD_SECONDS:
                reported_at = time.monotonic()
                self.output.report(f"Waiting for hosts: {self.slots.describe()}.")
        self.restarts.num_workers = len(slots) + len(self.slots.barred)
        if not self.slots.is_fixed and slots != self.plan.slots:
            names = ", ".join(f"worker {index} on {slot}" for index, slot in enumerate(slots))
            self.output.report(f"Starting {names}.")
        num_workers = self.plan.num_workers if self.slots.is_fixed else len(slots)
        self.plan = dataclasses.replace(self.plan, num_workers=num_workers, slots=slots)
        return None

    def _continues_elsewhere(self, outcome: StartOutcome) -> bool:
        """Whether the workers have left, as asked or because a machine is taken away, for others to continue."""
        if self.slots.is_fixed or outcome.first_signal is not None:
            return False
        if outcome.status == EXIT_DONE or outcome.status in FATAL:
            return False
        if not outcome.left_hosts:
            has_left = outcome.status == EXIT_PREEMPTED or outcome.exit_info.get("left_after_saving")
            if not has_left or outcome.worker is None:
                return False
            self.slots.withdrawn.add(self.plan.slots[outcome.worker])
        self.journal.log(
            "info",
            "hosts_changed",
            step=outcome.step,
            message="The workers have left for other hosts to continue.",
            hosts=list(self.plan.slots),
        )
        return True

    def _decide(self, outcome: StartOutcome) -> Restart | GiveUp:
        slot: Slot | None = None
        if outcome.is_certain and outcome.worker is not None:
            slot = self.plan.slots[outcome.worker - self.plan.first_index]
        is_retryable = bool(outcome.exit_info.get("address_taken"))  # a start chooses its ports again
        decision = self.restarts.decide(outcome.status, slot, outcome.step, is_retryable=is_retryable)
        if outcome.status not in FATAL or is_retryable:
            self._record_failure(outcome)
        return decision

    def _record_failure(self, outcome: StartOutcome) -> None:
        reading = outcome.vital.reading if outcome.vital else None
        how = f"hung: {outcome.hang.why}" if outcome.hang else f"ended with {describe(outcome.status)}"
        self.journal.log(
            "warning",
            "worker_hung" if outcome.hang else "worker_failed",
            worker=outcome.worker,
            step=outcome.step,
            message=f"worker {outcome.worker} {how}",
            status=outcome.status,
            error_id=outcome.error_id,
            host=reading.host if reading else None,
            pid=outcome.vital.pid if outcome.vital else None,
            phase=reading.phase if reading else None,
            place=None if outcome.worker is None else self.plan.slot_numbers[outcome.worker - self.plan.first_index],
            is_certain=outcome.is_certain,
            num_workers=len(self.plan.slot_numbers),
        )

    def _end(self, decision: GiveUp) -> None:
        if decision.event is not None:
            self.output.report(decision.reason)
            self.journal.log("error", decision.event, step=self.restarts.newest_step, message=decision.reason)

    def _wait_for_restart(self, again: Restart, noticed: float) -> int | None:
        """Waits until a restart is due, counted from `noticed`; returns an exit status if a signal ends the run."""
        ends = noticed + again.seconds
        self.slots.barred = again.left_out
        noun = "slot " if self.slots.is_fixed else ""
        words = f" without {noun}{', '.join(sorted(map(str, again.left_out)))}" if again.left_out else ""
        when = f" {again.seconds:g} s after the failure" if again.seconds else ""
        message = f"Starting again{when} (restart {again.number}){words}."
        self.output.report(message)
        self.journal.log("info", "restart_backoff", message=message, restart=again.number, seconds=again.seconds)
        while time.monotonic() < ends:
            if (status := self._pause()) is not None:
                return status
        return None

    def _pause(self) -> int | None:
        """Waits a moment while no worker runs; the exit status where the run is to end instead."""
        if self.signals:
            return self._leave()
        time.sleep(POLL_SECONDS)
        return None

    def _leave(self) -> int:
        """Says which signal it was that came while no worker ran; returns the status of a run that left as asked."""
        number = self.signals.popleft()
        self.output.report(f"{signal.Signals(number).name} was received: not starting the workers.")
        return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED


def _status_of(outcome: StartOutcome) -> int:
    """The launcher's exit status; workers that left at SIGTERM do not know that a Ctrl-C was the reason."""
    has_left = outcome.status == EXIT_PREEMPTED or outcome.exit_info.get("left_after_saving")
    return EXIT_INTERRUPTED if outcome.first_signal == signal.SIGINT and has_left else outcome.status


def report_outcome(outcome: StartOutcome, output: Output) -> None:
    """Reports at the very end, below what the others still wrote, whose failure it was."""
    if outcome.worker is None:
        return
    if outcome.hang is not None:
        suspects = " or ".join(f"worker {vital.worker}" for vital in outcome.hang.suspects)
        output.report(f"ended because of {suspects}: {outcome.hang.why}", "error")
        return
    output.report(f"worker {outcome.worker} ended with {describe(outcome.status)}", "error")
