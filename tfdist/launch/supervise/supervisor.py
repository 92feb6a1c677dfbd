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

from tfdist.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from tfdist.launch.plan import Plan
from tfdist.launch.processes import Worker
from tfdist.launch.supervise.journal import Journal
from tfdist.launch.supervise.output import Output
from tfdist.launch.supervise.restarts import Again, Enough, Failure, Restarts, Rules
from tfdist.launch.supervise.watch import (
    ENDED_AS_ASKED,
    EXIT_TIMED_OUT,
    OWN_DOING,
    POLL_SECONDS,
    Outcome,
    Patience,
    describe,
    watch,
)

Start = Callable[[Plan, Output], contextlib.AbstractContextManager[Sequence[Worker]]]


def supervise(
    plan: Plan, start: Start, output: Output, *, signals: collections.deque[int], patience: Patience, rules: Rules
) -> int:
    """Runs the workers to the end of the run; returns the exit status.

    Args:
      plan: of the first start.
      start: one of the launchers.
      output: where all that is said goes.
      signals: received by the launcher, see `watch`.
      patience: of each start; its time limit is for all of them together.
      rules: how often, and how, to start again.
    """
    return _Supervisor(plan, start, output, signals, patience, rules).run()


class _Supervisor:
    def __init__(
        self,
        plan: Plan,
        start: Start,
        output: Output,
        signals: collections.deque[int],
        patience: Patience,
        rules: Rules,
    ) -> None:
        self.plan = plan
        self.start = start
        self.output = output
        self.signals = signals
        self.begun = time.monotonic()
        self.patience = dataclasses.replace(patience, begun=self.begun)
        self.restarts = Restarts(rules, plan.num_workers)
        self.journal = Journal(output.say, worker=plan.first_index)
        self.run_dir: str | None = None

    def run(self) -> int:
        while True:
            if self.signals:
                return self._leave()
            outcome = self._run_once()
            report(outcome, self.output)
            self.run_dir = outcome.facts.get("run_dir", self.run_dir)
            has_left = outcome.facts.get("left_after_saving") or outcome.facts.get("left_unsaved")
            left = outcome.was_interrupted or has_left or outcome.status == EXIT_TIMED_OUT
            decision: Again | Enough = Enough() if left or not outcome.status else self._decide(outcome)
            if isinstance(decision, Enough):
                self._end(decision)
                return _status_of(outcome)
            status = self._wait(decision, outcome.noticed)
            if status is not None:
                return status

    def _run_once(self) -> Outcome:
        with self.start(self.plan, self.output) as workers:
            return watch(workers, signals=self.signals, say=self.output.say, patience=self.patience)

    def _decide(self, outcome: Outcome) -> Again | Enough:
        place = self.plan.place_of(outcome.worker) if outcome.is_certain and outcome.worker is not None else None
        may_mend = bool(outcome.facts.get("address_taken"))  # a start chooses its ports anew
        decision = self.restarts.after(Failure(outcome.status, place, outcome.step), may_mend=may_mend)
        if outcome.status not in OWN_DOING or may_mend:
            self._note_failure(outcome)
        return decision

    def _note_failure(self, outcome: Outcome) -> None:
        reading = outcome.vital.reading if outcome.vital else None
        how = f"hung: {outcome.hang.why}" if outcome.hang else f"ended with {describe(outcome.status)}"
        self.journal.note(
            "warning",
            "worker_hung" if outcome.hang else "worker_failed",
            worker=outcome.worker,
            step=outcome.step,
            message=f"worker {outcome.worker} {how}",
            status=outcome.status,
            host=reading.host if reading else None,
            pid=outcome.vital.pid if outcome.vital else None,
            phase=reading.phase if reading else None,
            place=None if outcome.worker is None else self.plan.place_of(outcome.worker),
            is_certain=outcome.is_certain,
            num_workers=len(self.plan.places),
        )

    def _end(self, decision: Enough) -> None:
        if decision.event is not None:
            self.output.say(decision.reason)
            self.journal.note("error", decision.event, step=self.restarts.newest_step, message=decision.reason)
        self.journal.store(self.run_dir)

    def _wait(self, again: Again, noticed: float) -> int | None:
        """Until the next start; the exit status where it does not come to that. `noticed` is when the failure was."""
        was_out = self.plan.left_out
        ends = noticed + again.seconds
        self.plan = dataclasses.replace(self.plan, left_out=again.left_out, begin_at=ends if again.is_warm else None)
        words = self._changes(was_out)
        message = f"Starting again {again.seconds:g} s after the failure (restart {again.number}){words}."
        self.output.say(message)
        self.journal.note("info", "restart_backoff", message=message, restart=again.number, seconds=again.seconds)
        self.journal.store(self.run_dir)
        limit = self.begun + (self.patience.timeout_seconds or float("inf"))
        while (now := time.monotonic()) < ends and not again.is_warm:
            if self.signals:
                return self._leave()
            if now >= limit:
                self.output.say(f"The time of {self.patience.timeout_seconds:g} s is up.")
                return EXIT_TIMED_OUT
            time.sleep(min(POLL_SECONDS, ends - now))
        self.journal.note(
            "info",
            "restarted",
            step=self.restarts.newest_step,
            restart=again.number,
            num_workers=len(self.plan.places),
            places=self.plan.places,
        )
        self.journal.store(self.run_dir)
        return None

    def _leave(self) -> int:
        """Says which signal it was that came while no worker ran; returns the status of a run that left as asked."""
        number = self.signals.popleft()
        self.output.say(f"{signal.Signals(number).name} was received: not starting the workers.")
        return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED

    def _changes(self, was_out: frozenset[int]) -> str:
        """Who is left out from now on, and who is back, as a clause."""
        gone, back = sorted(self.plan.left_out - was_out), sorted(was_out - self.plan.left_out)
        count = f"{len(self.plan.places)} of {self.plan.num_workers} workers"
        if gone:
            return f" with {count}: place {', '.join(map(str, gone))} does not come back"
        return f" with {count}: place {', '.join(map(str, back))} is taken in again" if back else ""


def _status_of(outcome: Outcome) -> int:
    """Of the whole; the workers, which got SIGTERM, do not know that it was Ctrl-C that had them save and leave."""
    has_left = outcome.status == EXIT_PREEMPTED or outcome.facts.get("left_after_saving")
    return EXIT_INTERRUPTED if outcome.first_signal == signal.SIGINT and has_left else outcome.status


def report(outcome: Outcome, output: Output) -> None:
    """Says at the very end, below what the others still wrote, whose failure it was."""
    if outcome.worker is None:
        return
    if outcome.hang is not None:
        suspects = " or ".join(f"worker {vital.worker}" for vital in outcome.hang.suspects)
        output.say(f"ended because of {suspects}: {outcome.hang.why}")
        return
    words = [] if outcome.status in ENDED_AS_ASKED else output.last_words(outcome.worker)
    quoted = ["  " + line for line in words]
    output.say(
        "\n".join([f"worker {outcome.worker} ended with {describe(outcome.status)}{':' * bool(words)}", *quoted])
    )
