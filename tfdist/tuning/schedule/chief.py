"""The chief of a sweep: hands values to free workers, tells the oracle how they went, and can be killed at any moment.

Invariant: what the journal holds is all that a chief knows; one that is started again reads it, gives the oracle the
same calls in the same order, and continues with the trials that ran. A trial ends once. Nothing here trains or imports
TensorFlow.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tfdist.errors import TfdistError, UserError
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.places.trials import Executor, TrialExit, name_of
from tfdist.tuning.schedule import journal as journals
from tfdist.tuning.schedule.history import FAILED, INFEASIBLE, INTERRUPTED
from tfdist.tuning.schedule.interruptions import Interruptions
from tfdist.tuning.schedule.journal import Journal
from tfdist.tuning.schedule.signals import Leaving
from tfdist.tuning.schedule.trial import ActiveTrial, Report, SeedRun
from tfdist.tuning.search import hypermodel
from tfdist.tuning.search.objective import Objective
from tfdist.tuning.search.oracle_client import OracleClient, Suggestion
from tfdist.tuning.search.space import Space
from tfdist.tuning.settings import TuneSettings

POLL_SECONDS = 0.1
REMOTE_POLL_SECONDS = 5.0
PARENT, EPOCHS, ROUND = "tuner/trial_id", "tuner/epochs", "tuner/round"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
      epochs: of a whole training; None where `train.steps` ends it.
      seed: `train.seed`; the trial's further seeds are the numbers behind it.
    """

    run_dir: str
    settings: TuneSettings
    space: Space
    objective: Objective
    epochs: int | None
    seed: int

    def directory(self, trial: str, seed: int = 0) -> RunDirectory:
        """Of a trial's run with its first seed, 0, or another."""
        return RunDirectory(files.join(self.run_dir, "trials", f"{trial}-seed-{seed}" if seed else trial))


@dataclasses.dataclass(frozen=True)
class _Job:
    """The run of one seed of a trial."""

    trial: ActiveTrial
    run: SeedRun

    @property
    def is_to_run(self) -> bool:
        return self.trial.is_open and self.run.status is None


class Chief:
    """One sweep.

    Args:
      plan: what is to be done.
      oracle: gives the values.
      journal: of the run directory.
      executor: where trials run.
      on_wait: called some times a second while nothing happens.
    """

    def __init__(
        self,
        plan: Plan,
        oracle: OracleClient,
        journal: Journal,
        executor: Executor,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._oracle = oracle
        self._journal = journal
        self._executor = executor
        self._on_wait = on_wait
        self._pending: collections.deque[_Job] = collections.deque()
        self._running: dict[str, _Job] = {}  # by the names of the run directories
        self._trials: dict[str, ActiveTrial] = {}
        self._names: dict[str, str] = {}  # of the trials, by their names in the oracle
        self._failures = 0
        self._interruptions = Interruptions()
        self._leaving = Leaving()
        self._is_closing = False
        self._started = time.monotonic()
        self._next_look = 0.0
        self._poll_seconds = REMOTE_POLL_SECONDS if files.is_remote(plan.run_dir) else POLL_SECONDS

    def run(self, events: Sequence[Mapping[str, Any]]) -> None:
        """From what the journal holds to the end.

        Raises:
          UserError: the first trial cannot be trained, for a reason that is the user's.
          PreemptedError: this process was told to leave; the trials have saved.
          KeyboardInterrupt: it was told so twice.
          TfdistError: too many trials failed, or were interrupted without progress.
        """
        self._replay(events)
        with self._leaving.noting():
            while True:
                while not self._is_closing and self._executor.num_free and (job := self._next_job()) is not None:
                    self._start(job)
                if not self._running and (self._is_closing or not (self._pending or not self._oracle.is_over)):
                    break
                self._executor.wait(POLL_SECONDS)
                self._on_wait()
                for ended in self._executor.collect():
                    self._process_ended(ended)
                self._look_at_reports()
                self._check_time()
        self._leaving.leave_if_told("Left after the running trials had saved. The same command resumes from there.")

    # What was before

    def _replay(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            kind, name = event["event"], event.get("trial", "")
            if kind == journals.TRIAL_STARTED:
                self._replay_start(event)
                self._trials[name].is_told = True
            elif kind == journals.TRIAL_REPORTED:
                self._replay_report(event)
            elif kind == journals.TRIAL_ENDED and event["status"] == INTERRUPTED:
                self._trials[name].is_told = False
            elif kind == journals.TRIAL_ENDED:
                self._oracle.replay(event["asked"])
                trial = self._trials[name]
                trial.is_open = trial.is_told = False
                self._plan.space.news(event.get("found", []))
                trial.values |= event.get("values", {})
                self._tell_end(trial, event["objective"], event["message"], event.get("found", []))
        for trial in self._trials.values():
            if trial.is_open:
                if trial.is_told:
                    self._write_end(trial, INTERRUPTED, None, "the sweep was interrupted")
                self._queue(trial)

    def _replay_start(self, event: Mapping[str, Any]) -> None:
        name, rung = event["trial"], event["rung"]
        known = self._trials.get(name)
        if known is not None and known.rung == rung and known.is_open:
            return  # it continued after an interruption
        self._oracle.replay(event["asked"])
        suggestion = self._oracle.take()
        if suggestion is None:
            raise TfdistError(
                f"{self._plan.run_dir}: the oracle does not give trial {name} again. Was the sweep made by other "
                "versions of tfdist or KerasTuner? Give another --run_dir."
            )
        values = self._plan.space.restored(event["values"])
        self._oracle.override(suggestion.name, self._plan.space.encoded(values))
        self._open(suggestion, values)

    def _replay_report(self, event: Mapping[str, Any]) -> None:
        trial = self._trials[event["trial"]]
        value = float(event["objective"])
        report = Report(event["epoch"], event["step"], value, event["metrics"])
        for run in trial.runs:
            run.reports[report.step] = report
        if self._plan.settings.search.STOPS:
            self._oracle.replay(event["asked"])
            self._report(trial, report)

    # What is to be started

    def _next_job(self) -> _Job | None:
        while True:
            while self._pending:
                job = self._pending.popleft()
                if job.is_to_run:
                    return job
            suggestion = self._oracle.take()
            if suggestion is None:
                return None
            self._queue(self._open(suggestion, self._plan.space.decoded(suggestion.values)))

    def _open(self, suggestion: Suggestion, values: dict[str, Any]) -> ActiveTrial:
        """The trial that the suggestion continues, as it wants it; a new one where it continues none."""
        parent = suggestion.values.get(PARENT)
        trial = None if parent is None else self._trials[self._names[parent]]
        rung = suggestion.values.get(ROUND, 0)
        epochs = suggestion.values.get(EPOCHS, values.get("train.epochs", self._plan.epochs))
        if trial is None:
            name = f"{len(self._trials):04d}"
            runs = [
                SeedRun(self._plan.seed + index, self._plan.directory(name, index))
                for index in range(self._plan.settings.seeds_per_trial)
            ]
            trial = self._trials[name] = ActiveTrial(name, values, runs, suggestion.name, rung, epochs)
        else:
            trial.start_rung(suggestion.name, rung, epochs)
        trial.is_partial = EPOCHS in suggestion.values and cast(int, epochs) < cast(int, self._plan.epochs)
        self._names[suggestion.name] = trial.name
        return trial

    def _queue(self, trial: ActiveTrial) -> None:
        self._pending.extend(_Job(trial, run) for run in trial.runs if run.status is None)

    def _start(self, job: _Job) -> None:
        trial = job.trial
        if job.run.stop_asked and job.run.reports:  # the oracle had said so before the chief was killed
            job.run.stop(self._plan.objective)
            self._conclude(trial)
            return
        self._write_start(trial)
        self._running[name_of(job.run.directory)] = job
        self._executor.start(job.run.directory, self._parameters(job))

    def _parameters(self, job: _Job) -> list[str]:
        """The gin statements that tell this run from others."""
        made = self._plan.space.statements(job.trial.values)
        if job.run.seed != self._plan.seed:
            made.append(f"train.seed = {job.run.seed}")
        if job.trial.is_partial:
            made.append(f"train.stop_after_epochs = {job.trial.epochs}")
        return made

    def _write_start(self, trial: ActiveTrial) -> None:
        if trial.is_told:
            return
        slot, trial.is_told = self._executor.next_free, True
        self._journal.write(
            journals.TRIAL_STARTED,
            trial=trial.name,
            values=trial.values,
            rung=trial.rung,
            epochs=trial.epochs,
            worker=slot.number,
            **({} if slot.host is None else {"host": slot.host}),
            asked=self._oracle.asked,
        )

    # What comes back

    def _process_ended(self, ended: TrialExit) -> None:
        job = self._running.pop(ended.name)
        run, trial = job.run, job.trial
        trial.active_seconds += ended.seconds
        self._take_reports(job, anew=True)
        if not trial.is_open:
            return
        if not run.end(ended.status, ended.log, self._plan.objective, epochs=trial.epochs, lost=ended.lost):
            why = run.message or "it was told to leave, and has saved"
            self._write_end(trial, INTERRUPTED, None, why)
            self._pending.appendleft(job)
            if not self._is_closing:
                self._count_interruption(run, why)
            return
        self._interruptions.progressed()
        if run.status == FAILED and ended.status == UserError.exit_status:
            if not any(each.reports for other in self._trials.values() for each in other.runs):
                self._stop_all()
                values = "\n".join(f"    {line}" for line in self._plan.space.statements(trial.values))
                raise UserError(
                    f"The first trial cannot be trained: {run.message}\n    with the trial's values:\n{values}"
                )
            run.status = INFEASIBLE  # others could be trained, so it is these values that do not go
        self._conclude(trial)

    def _count_interruption(self, run: SeedRun, why: str) -> None:
        try:
            self._interruptions.add(run.directory, why, num_running=len(self._running) + 1)
        except TfdistError:
            self._stop_all()
            raise

    def _conclude(self, trial: ActiveTrial) -> None:
        """Ends the trial if nothing of it is left to run."""
        if (end := trial.conclude()) is None:
            return
        trial.is_open = False
        self._stop(lambda other: other is trial)  # the other seeds, where one has failed
        status, objective, message = end
        found, more = self._found(trial)
        self._write_end(trial, status, objective, message, **more)
        self._tell_end(trial, objective, message, found)
        self._failures = self._failures + 1 if status == FAILED else 0
        if self._failures >= self._plan.settings.max_failures:
            self._stop_all()
            raise TfdistError(f"{self._failures} trials in a row failed; the last, {trial.name}: {message}")

    def _found(self, trial: ActiveTrial) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What its model has asked for that was not known, and what of it the journal is told.

        The values that the model got are the trial's from now on.
        """
        told = hypermodel.read(trial.runs[0].directory.path) if self._plan.space.may_grow else None
        if told is None:
            return [], {}
        found = self._plan.space.news(told.space)
        more: dict[str, Any] = {"found": found} if found else {}
        if not told.values.keys() <= trial.values.keys():
            trial.values |= told.values
            more = {"values": trial.values} | more
        return found, more

    def _write_end(self, trial: ActiveTrial, status: str, objective: float | None, message: str, **more: Any) -> None:
        self._journal.write(
            journals.TRIAL_ENDED,
            trial=trial.name,
            rung=trial.rung,
            status=status,
            objective=objective,
            epochs=trial.epochs_done,
            seconds=round(trial.active_seconds, 3),
            message=message,
            asked=self._oracle.asked,
            **more,
        )
        trial.active_seconds, trial.is_told = 0.0, False

    def _tell_end(
        self, trial: ActiveTrial, objective: float | None, message: str, found: Sequence[Mapping[str, Any]]
    ) -> None:
        values = self._plan.space.encoded(trial.values)
        epochs = trial.epochs or trial.epochs_done
        self._oracle.end(trial.suggestion, objective, epochs, message, new=found, values=values)

    def _look_at_reports(self) -> None:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._poll_seconds
            for job in self._running.values():
                self._take_reports(job)

    def _take_reports(self, job: _Job, *, anew: bool = False) -> None:
        trial = job.trial
        for new in job.run.new_reports(self._plan.objective, anew=anew):
            self._interruptions.progressed()
            report = trial.mean_report(new.step)
            if report is None or not trial.is_open:
                continue
            self._journal.write(
                journals.TRIAL_REPORTED,
                trial=trial.name,
                **dataclasses.asdict(report),
                asked=self._oracle.asked,
            )
            if self._plan.settings.search.STOPS:
                self._report(trial, report)

    def _report(self, trial: ActiveTrial, report: Report) -> None:
        """Reports an evaluation to the oracle, and stops the trial where that says so."""
        if self._oracle.report(trial.suggestion, report.objective, report.epoch):
            for run in trial.runs:
                run.stop_asked = True
            self._stop(lambda other: other is trial)

    # Leaving

    def _stop(self, is_meant: Callable[[ActiveTrial], bool] = lambda trial: True) -> None:
        """Lets the running trials that are meant save and leave."""
        for job in self._running.values():
            if is_meant(job.trial):
                self._executor.stop(job.run.directory)

    def _check_time(self) -> None:
        limit = self._plan.settings.max_seconds
        is_late = limit is not None and time.monotonic() - self._started > limit
        if (is_late or self._leaving.is_told) and not self._is_closing:
            self._is_closing = True
            self._stop()

    def _stop_all(self) -> None:
        self._is_closing = True
        for trial in {job.trial.name: job.trial for job in self._running.values()}.values():
            self._write_end(trial, INTERRUPTED, None, "the sweep ended")
