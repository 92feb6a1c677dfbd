"""The chief of a sweep: hands values to free workers, tells the oracle how they went, and can be killed at any moment.

Invariant: what the journal holds is all that a chief knows; one that is started again reads it, gives the oracle the
same calls in the same order, and continues with the trials that ran. A trial ends once. Nothing here trains or imports
TensorFlow.
"""

from __future__ import annotations

import collections
import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.checkpoint import catalog
from tfdist.checkpoint.preemption import SIGNALS, Preemption
from tfdist.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, PeerLostError, PreemptedError, TfdistError, UserError
from tfdist.storage import files
from tfdist.telemetry.result import find_checkpoint_dir
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.execution.local_slots import LocalSlots, TrialExit
from tfdist.tuning.schedule import journal as journals
from tfdist.tuning.schedule.journal import FAILED, INFEASIBLE, INTERRUPTED, Journal, TrialPoint
from tfdist.tuning.schedule.trial import DISK_FAILED, ActiveTrial, TuneObjective
from tfdist.tuning.search import hypermodel
from tfdist.tuning.search.space import Space
from tfdist.tuning.tune_settings import TuneSettings

if TYPE_CHECKING:
    import keras_tuner

    from tfdist.tuning.search.oracles import OracleClient

MAX_FAILURES = 3  # in a row, by bugs of tfdist
MAX_INTERRUPTIONS = 10  # in a row, for each trial that runs at the same time
POLL_SECONDS = 0.1
REMOTE_POLL_SECONDS = 5.0
PARENT, EPOCHS, ROUND = "tuner/trial_id", "tuner/epochs", "tuner/round"


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """The trials to run; `epochs` are those of a whole training, None where `train.steps` ends it."""

    run_dir: str
    settings: TuneSettings
    space: Space
    objective: TuneObjective
    epochs: int | None

    def directory(self, trial: str) -> RunDirectory:
        """Returns the run directory of a trial."""
        return RunDirectory(files.join(self.run_dir, "trials", trial))


class Interruptions:
    """Counts interruptions in a row, between which no trial was evaluated or ended, nor the interrupted one saved.

    An interruption (a kill from outside, a preemption, a lost worker) says nothing of a trial's values, so it is never
    the trial that ends for it.
    """

    def __init__(self, num_workers: int) -> None:
        self._in_a_row = 0
        self._limit = MAX_INTERRUPTIONS * num_workers
        self._checkpoint_steps: dict[str, int] = {}

    def reset(self) -> None:
        """Counts from 0 again, as a trial was evaluated, or ended."""
        self._in_a_row = 0

    def add(self, directory: RunDirectory, why: str) -> None:
        """Counts an interruption of the run in the directory.

        Raises:
          PeerLostError: there were too many in a row; UserError where the last one's disk was full.
        """
        checkpoints = RunDirectory(directory.path, find_checkpoint_dir(directory.path)).checkpoints
        newest = max((step for step, _ in catalog.list_paths(checkpoints)), default=0)
        if newest > self._checkpoint_steps.get(directory.path, 0):
            self._in_a_row = 0
        self._checkpoint_steps[directory.path] = newest
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            raise (UserError if why.startswith(DISK_FAILED) else PeerLostError)(
                f"The sweep makes no progress: {self._in_a_row} interruptions of trials in a row, without an "
                f"evaluation or a newer checkpoint in between. The last, of {directory.path}: {why.rstrip('.')}. Make "
                "room on a full disk, find out who ends these processes (a scheduler; the kernel, for want of memory), "
                "or let trials back up more often (train.checkpoint). The same command resumes it."
            )


class Chief:
    """The scheduler of one sweep.

    Args:
      plan: what is to be done.
      oracle: gives the values.
      journal: of the run directory.
      slots: where trials run.
    """

    def __init__(self, plan: SweepPlan, oracle: OracleClient, journal: Journal, slots: LocalSlots) -> None:
        self._plan = plan
        self._oracle = oracle
        self._journal = journal
        self._slots = slots
        self._pending: collections.deque[ActiveTrial] = collections.deque()
        self._running: dict[str, ActiveTrial] = {}
        self._trials: dict[str, ActiveTrial] = {}
        self._names: dict[str, str] = {}  # of the trials, by their names in the oracle
        self._failures = 0
        self._interruptions = Interruptions(plan.settings.num_workers)
        self._preemption = Preemption(tell=lambda message: None, signals=(*SIGNALS, signal.SIGINT))
        self._is_closing = False
        self._started = time.monotonic()
        self._next_poll = 0.0
        self._poll_seconds = REMOTE_POLL_SECONDS if files.is_remote(plan.run_dir) else POLL_SECONDS

    def run(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Runs the sweep from the journal's state to its end.

        Raises:
          UserError: the first trial cannot be trained, for a reason that is the user's.
          PreemptedError: this process was told to leave; the trials have saved.
          KeyboardInterrupt: it was told so twice.
          TfdistError: too many trials failed, or were interrupted without progress.
        """
        self._replay(events)
        try:
            with self._preemption:  # a first Ctrl-C lets trials save, a second raises KeyboardInterrupt
                while True:
                    while not self._is_closing and self._slots.num_free and (trial := self._next_trial()) is not None:
                        if trial.status is None:
                            self._slots.start(trial.directory, self._begin(trial))
                    if not self._running and (self._is_closing or not (self._pending or not self._oracle.is_over)):
                        break
                    self._slots.wait(POLL_SECONDS)
                    for ended in self._slots.collect():
                        self._process_exit(ended)
                    self._poll_reports()
                    self._check_time()
        except TfdistError:
            for trial in self._running.values():
                self._record_end(trial, INTERRUPTED, "the sweep ended")
            raise
        if self._preemption.reason is not None:
            raise PreemptedError(
                "Left after the running trials had saved. The same command resumes from there.",
                exit_status=EXIT_INTERRUPTED if self._preemption.is_interrupt else EXIT_PREEMPTED,
            )

    # What was before

    def _replay(self, events: Sequence[Mapping[str, Any]]) -> None:
        running: set[str] = set()
        for event in events:
            if event["event"] == journals.TRIAL_STARTED:
                self._reopen(event)
                running.add(event["trial"])
            elif event["event"] == journals.TRIAL_ENDED:
                running.discard(event["trial"])
            self._apply(event)
        for trial in self._trials.values():
            if trial.name in running:
                self._record_end(trial, INTERRUPTED, "the sweep was interrupted")
            if trial.status is None:
                self._pending.append(trial)

    def _reopen(self, event: Mapping[str, Any]) -> None:
        """Gives the trial of a start the values that it had, once for each rung."""
        name, rung = event["trial"], event["rung"]
        known = self._trials.get(name)
        if known is not None and known.rung == rung and known.status is None:
            return  # it continued after an interruption
        self._oracle.replay(event["asked"])
        suggestion = self._oracle.take()
        if suggestion is None:
            raise TfdistError(
                f"{self._plan.run_dir}: the oracle does not give trial {name} again. Was the sweep made by other "
                "versions of tfdist or KerasTuner? Give another --run_dir."
            )
        values = self._plan.space.from_json(event["values"])
        suggestion.hyperparameters.values.update(self._plan.space.encode(values))
        self._open(suggestion, values)

    # What happens

    def _record(self, kind: str, trial: ActiveTrial, **details: Any) -> None:
        """Adds an event to the journal, and then acts on it."""
        event = {"event": kind, "trial": trial.name, **details, "asked": self._oracle.num_requests}
        self._journal.write(**event)
        self._apply(event)

    def _apply(self, event: Mapping[str, Any]) -> None:
        """Tells the trial and the oracle of an event, be it of now or of an earlier start."""
        kind, trial = event["event"], self._trials.get(event.get("trial", ""))
        if kind == journals.TRIAL_REPORTED and trial is not None:
            report = TrialPoint(event["epoch"], event["step"], float(event["objective"]))
            trial.reports[report.step] = report
            if self._plan.settings.search.STOPS:
                self._oracle.replay(event["asked"])
                trial.is_stop_requested |= self._oracle.report(trial.suggestion, report.objective, report.epoch)
        elif kind == journals.TRIAL_ENDED and trial is not None and event["status"] != INTERRUPTED:
            self._oracle.replay(event["asked"])
            trial.status, trial.objective, trial.message = event["status"], event["objective"], event["message"]
            found = event.get("found", [])
            self._plan.space.add_new(found)
            trial.values |= event.get("values", {})
            values, epochs = self._plan.space.encode(trial.values), trial.epochs or trial.epochs_done
            self._oracle.end(trial.suggestion, trial.objective, epochs, trial.message, found, values)

    # What is to be started

    def _next_trial(self) -> ActiveTrial | None:
        """One to be started; one that the oracle had stopped before the chief was killed has ended here."""
        if self._pending:
            trial = self._pending.popleft()
            if trial.is_stop_requested and trial.reports:
                trial.stop(self._plan.objective)
                self._conclude(trial)
            return trial
        if (suggestion := self._oracle.take()) is None:
            return None
        return self._open(suggestion, self._plan.space.decode(suggestion.hyperparameters.values))

    def _open(self, suggestion: keras_tuner.engine.trial.Trial, values: dict[str, Any]) -> ActiveTrial:
        """The trial that the suggestion continues, as it wants it; a new one where it continues none."""
        wanted, name_in_oracle = suggestion.hyperparameters.values, suggestion.trial_id
        parent = wanted.get(PARENT)
        trial = None if parent is None else self._trials[self._names[parent]]
        rung = wanted.get(ROUND, 0)
        epochs = wanted.get(EPOCHS, values.get("train.epochs", self._plan.epochs))
        if trial is None:
            name = f"{len(self._trials):04d}"
            trial = ActiveTrial(name, self._plan.directory(name), values, name_in_oracle, rung, epochs)
            self._trials[name] = trial
        else:
            trial.start_rung(name_in_oracle, rung, epochs)
        self._names[name_in_oracle] = trial.name
        return trial

    def _begin(self, trial: ActiveTrial) -> list[str]:
        """Records a start of a trial; the gin statements that it is trained with."""
        self._record(journals.TRIAL_STARTED, trial, values=trial.values, rung=trial.rung, epochs=trial.epochs)
        self._running[trial.name] = trial
        statements = self._plan.space.statements(trial.values)
        is_partial = self._plan.settings.search.SETS_EPOCHS and trial.epochs != self._plan.epochs
        return statements + ([f"train.stop_after_epochs = {trial.epochs}"] if is_partial else [])

    # What comes back

    def _process_exit(self, ended: TrialExit) -> None:
        trial = self._running.pop(ended.name)
        trial.active_seconds += ended.seconds
        trial.host = ended.host
        self._read_reports(trial, anew=True)
        if not trial.end(ended.status, ended.log, self._plan.objective, lost=ended.lost):
            why = trial.message or "it was told to leave, and has saved"
            self._record_end(trial, INTERRUPTED, why)
            self._pending.appendleft(trial)
            if not self._is_closing:
                self._interruptions.add(trial.directory, why)
            return
        self._interruptions.reset()
        if trial.status == FAILED and ended.status == UserError.exit_status:
            if not any(each.reports for each in self._trials.values()):
                values = "\n".join(f"    {line}" for line in self._plan.space.statements(trial.values))
                raise UserError(
                    f"The first trial cannot be trained: {trial.message}\n    with the trial's values:\n{values}"
                )
            trial.status = INFEASIBLE  # others could be trained, so it is these values that do not go
        self._conclude(trial)

    def _conclude(self, trial: ActiveTrial) -> None:
        """Records the end of a trial that has ended."""
        assert trial.status is not None
        self._record_end(trial, trial.status, trial.message, **self._adopt_hyperparameters(trial))
        self._failures = self._failures + 1 if trial.status == FAILED else 0
        if self._failures >= MAX_FAILURES:
            raise TfdistError(f"{self._failures} trials in a row failed; the last, {trial.name}: {trial.message}")

    def _adopt_hyperparameters(self, trial: ActiveTrial) -> dict[str, Any]:
        """Adds what a trial's model defined to the space and the trial; returns it as fields for the journal."""
        built = hypermodel.read(trial.directory.path) if self._plan.space.may_grow else None
        if built is None:
            return {}
        found = self._plan.space.add_new(built.space)
        more: dict[str, Any] = {"found": found} if found else {}
        if built.values.keys() <= trial.values.keys():
            return more
        trial.values |= built.values
        return {"values": trial.values} | more

    def _record_end(self, trial: ActiveTrial, status: str, message: str, **more: Any) -> None:
        seconds, trial.active_seconds = round(trial.active_seconds, 3), 0.0
        self._record(
            journals.TRIAL_ENDED,
            trial,
            rung=trial.rung,
            status=status,
            objective=trial.objective,
            epochs=trial.epochs_done,
            seconds=seconds,
            message=message,
            **({} if trial.host is None else {"host": trial.host}),
            **more,
        )

    def _poll_reports(self) -> None:
        if time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + self._poll_seconds
            for trial in self._running.values():
                self._read_reports(trial)

    def _read_reports(self, trial: ActiveTrial, *, anew: bool = False) -> None:
        for report in trial.new_reports(self._plan.objective, anew=anew):
            self._interruptions.reset()
            was_stop_requested = trial.is_stop_requested
            self._record(journals.TRIAL_REPORTED, trial, **dataclasses.asdict(report))
            if trial.is_stop_requested and not was_stop_requested and trial.name in self._running:
                self._slots.stop(trial.name)

    def _check_time(self) -> None:
        limit = self._plan.settings.max_seconds
        is_late = limit is not None and time.monotonic() - self._started > limit
        if (is_late or self._preemption.reason is not None) and not self._is_closing:
            self._is_closing = True
            for trial in self._running.values():
                self._slots.stop(trial.name)
