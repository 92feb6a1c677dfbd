"""Opens what lets a run survive: the newest checkpoint read, the manager of the next ones, signals noted.

Invariant: whatever ends the training, what was saved before is stored before the process leaves.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.checkpoint.policy import ALL, CheckpointPolicy, CheckpointSchedule
from tfdist.checkpoint.preemption import SIGNALS, Preemption, find_address
from tfdist.checkpoint.restore import State
from tfdist.checkpoint.write.manager import CheckpointManager
from tfdist.checkpoint.write.writer import Part
from tfdist.errors import PreemptedError, UserError, build_user_error, shorten_list
from tfdist.storage import files
from tfdist.strategies.cluster import environment
from tfdist.telemetry import heartbeat
from tfdist.telemetry.events import EventLog
from tfdist.telemetry.result import versions
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.recovery.origins import StartFrom
from tfdist.training.recovery.recovery import MOST_SHOWN, Checkpoint, Recovery, RecoveryStart, load_checkpoint
from tfdist.training.recovery.weights import (
    START_FROM,
    find_by_path,
    find_on_chief,
    load_weights,
    locate_weights,
    put_weights,
)
from tfdist.training.run.assembly import Training, length_of
from tfdist.training.run.claim import differing_settings, refuse_differences
from tfdist.training.run.run import Run
from tfdist.training.step.optimizer import constant_rates, parts, steps_before_swa
from tfdist.training.step.state import Learner, TrainingState


def check_start_from(start: StartFrom | None) -> None:
    """Raises UserError where there is nothing at the path of `train.start_from`."""
    if start is not None:
        locate_weights(RunDirectory(start.path).path, START_FROM)


@contextlib.contextmanager
def open_recovery(training: Training) -> Iterator[RecoveryStart]:
    """The recovery of a training that has not begun, and where it resumes, from a checkpoint that is yet to restore.

    Raises:
      UserError: the checkpoint does not fit, or cannot be read.
    """
    run, learner, settings = training.run, training.learner, training.settings
    policy = settings.policy
    steps_per_epoch, identity = training.boundaries.steps_per_epoch, _describe_run(training)
    heartbeat.beat(heartbeat.RESTORING)
    state = TrainingState(run.strategy, learner)
    start, lost = _load_newest(training, state, identity) if policy is not None else (None, 0)
    if start is None:
        if policy is not None:
            run.strategy.on_chief(lambda: _check_none_is_damaged(run), "The checkpoints cannot be read")
        lost = _begin_anew(run, keeps_checkpoints=policy is not None)
    if start is not None and run.claim.extends and run.topology.is_chief:
        run.events.info("extended", step=start.step, message=f"{run.claim.said} More is asked for, and it resumes.")
        files.remove(run.directory.result)  # which a run has when it is done
    weights = settings.start
    if start is None and weights is not None:
        _load_start_weights(run, learner, state, weights)
    if start is None and run.request.initial_epoch:
        start = Checkpoint(run.request.initial_epoch * steps_per_epoch)
    if policy is None:
        yield RecoveryStart(None, start, lost, state)
        return
    with contextlib.ExitStack() as stack:
        manager, part = None, _plan_part(run, policy, is_sharded=state.is_sharded)
        if run.topology.is_chief or part is not None:
            manager = CheckpointManager(
                run.directory.checkpoints,
                policy,
                identity=identity,
                tell=run.events,
                still_ours=run.claim.check,
                part=part,
            )
            stack.push(functools.partial(_close, manager))
        preemption = Preemption(
            tell=lambda message: run.events.warning("preemption_noticed", message=message),
            metadata_address=find_address(environment.metadata_address(environment.current())),
            signals=(*SIGNALS, signal.SIGINT),
            abort=run.request.abort,
        )
        recovery = Recovery(
            strategy=run.strategy,
            state=state,
            manager=manager,
            schedule=CheckpointSchedule(policy, steps_per_epoch=steps_per_epoch, step=start.step if start else 0),
            preemption=stack.enter_context(preemption),
            exit_status=policy.preempted_exit_status,
            start_step=start.step if start else None,
            all_write=part is not None,
        )
        recovery.prepare()
        yield RecoveryStart(recovery, start, lost, state)


def _plan_part(run: Run, policy: CheckpointPolicy, *, is_sharded: bool) -> Part | None:
    """Plans what this worker writes of each checkpoint; None where the chief writes all. A collective.

    Raises:
      UserError: the workers do not share the run directory.
    """
    topology = run.topology
    if topology.num_workers == 1 or (policy.writers != ALL and not is_sharded):
        return None
    start = run.strategy.broadcast(uuid.uuid4().hex[:12].encode() if topology.is_chief else None)
    apart = run.directory.checkpoint_dir
    if run.strategy.any_worker(not files.exists(run.directory.config) or not (apart is None or files.is_dir(apart))):
        why = "train.sharding" if is_sharded else "policy.CheckpointPolicy.writers = 'all'"
        where = f"--run_dir={run.directory.path}" + ("" if apart is None else f" and backup_dir = {apart!r}")
        raise UserError(
            f"With {why} every worker writes checkpoints, and not all workers see {where}. Give a directory that they "
            "share, such as one on gs://."
        )
    return Part(topology.worker_index, topology.num_workers, bytes(start).decode())


def _close(manager: CheckpointManager, kind: type[BaseException] | None, error: object, stack: object) -> None:
    """Ends a manager's thread; a run that fails waits for no other worker's part."""
    if kind is not None and not issubclass(kind, PreemptedError):
        manager.abandon()
    manager.close()


SIZES = {  # what `_describe_run` calls what a run may not change
    "num_examples": "examples of the training data",
    "steps_per_epoch": "steps of an epoch",
    "swa_start": "step from which train.swa_start averages",
}


def _describe_run(training: Training) -> dict[str, Any]:
    """Describes, in a checkpoint, the run that makes it; before a restore, so that the rates are those it is given."""
    run, source, settings, optimizer = training.run, training.source, training.settings, training.learner.optimizer
    return {
        "settings": dict(run.request.settings()),
        "strategy": run.strategy.name,
        "num_workers": run.topology.num_workers,
        "num_replicas": run.topology.num_replicas,
        "num_examples": source.num_examples if source.counts_examples else None,
        "steps_per_epoch": training.boundaries.steps_per_epoch,
        "rates": constant_rates(optimizer),
        "swa_start": steps_before_swa(optimizer, settings.swa_start, length_of(settings, training.plan)),
        "versions": versions(),
    }


def _load_newest(training: Training, state: TrainingState, here: dict[str, Any]) -> tuple[Checkpoint | None, int]:
    """The checkpoint that the run `here` continues from, if it does, and, on the chief, the steps lost.

    Raises:
      UserError: it does not fit, or is of training data of another size; on every worker.
    """
    run, settings, optimizer = training.run, training.settings, training.learner.optimizer
    lost, directory = 0, run.directory.checkpoints
    there: dict[str, Any] = {}  # as the run described itself, on the chief
    changes: list[str] = []

    def read() -> State | None:
        found = restore.load_newest(directory, tell=run.events, wanted=lambda name: not state.is_elsewhere(name))
        if found is not None and found.manifest is not None:
            there.update(found.manifest.identity)
            if settings.accept_changes:
                changes.extend(differing_settings(there.get("settings", {}), here["settings"]))
            else:
                lines = [
                    f"{what}: {theirs:,} there, {ours:,} here"
                    for name, what in SIZES.items()
                    if (theirs := there.get(name)) and (ours := here[name]) and theirs != ours
                    if name != "swa_start" or found.step > min(theirs, ours)  # before, there is no average yet
                ]
                refuse_differences(run.directory, lines, f"at step {found.step:,}")
        return found

    start = load_checkpoint(run.strategy, state, read, partial=settings.accept_changes, tell=run.events)
    if start is not None:
        # The checkpoint's rate counts, which a callback may have changed, unless another one was given and accepted.
        given, before = here["rates"], there.get("rates", here["rates"])
        acts = run.strategy.from_chief([bool(changes) and before[i : i + 1] != [r] for i, r in enumerate(given)])
        new_rates = [rate if is_new else None for rate, is_new in zip(given, acts, strict=True)]
        restore_all = functools.partial(_restore_but_rates, start, optimizer, new_rates)
        start = Checkpoint(start.step, start.values, start.arrays, restore_all)
        here["rates"] = given if changes else before  # for a callback may have changed those of a compiled optimizer
        if run.topology.is_chief and run.request.keeps and not files.exists(run.directory.starts):
            run.warn_of_file(f"{run.directory.starts} is missing: goodput counts from this start on.")
        logged = start.step - 1 if start.values.get("boundary_is_due") else start.step
        logged_until = logged - logged % (here | there)["steps_per_epoch"] if run.request.keeps else 0
        lost = max(0, (run.metrics.discard_after(logged, logged_until=logged_until) or 0) - start.step)
        again = f" At least {lost:,} steps after it were lost and are done again." if lost else ""
        asked = training.boundaries.total_steps
        if start.step > asked:
            again += f" That is more than the {asked:,} steps that are asked for. Nothing is left to train."
        run.events.info(
            "resumed",
            step=start.step,
            message=f"Resuming at step {start.step:,}, from the checkpoint in {directory}.{again}",
            lost_steps=lost,
        )
    return start, lost


def _restore_but_rates(checkpoint: Checkpoint, optimizer: keras.Optimizer, rates: list[float | None]) -> None:
    """Restores a checkpoint; of `rates`, those that are a number stand in place of its own."""
    checkpoint.restore()
    for each, rate in zip(parts(optimizer), rates, strict=True):
        if rate is not None:
            each.learning_rate = rate


def _check_none_is_damaged(run: Run) -> None:
    """Raises UserError where there are checkpoints, of which none could be read."""
    directory = run.directory.checkpoints
    damaged = [entry.step for entry in list_checkpoints(directory) if not entry.is_leftover]
    if damaged or run.claim.extends:
        steps = ", ".join(f"{step:,}" for step in damaged)
        raise build_user_error(
            f"{run.claim.said or f'The run in {run.directory.path} is not finished.'} It cannot resume: none of its "
            f"checkpoints is whole{f' (of the steps {steps})' if steps else ''}. Restore one from a copy of the run; "
            f"or move {directory} away, and the training begins again.",
            error_id="damaged-checkpoint",
        )


def _begin_anew(run: Run, *, keeps_checkpoints: bool) -> int:
    """Begins at step 0, and says so where an earlier start came to no checkpoint; its steps, as far as known."""
    lost = run.metrics.discard_after(0) or 0
    if run.earlier_starts:
        why = "an earlier start of this run was not saved" if keeps_checkpoints else "train.checkpoint is 'off'"
        which = f", and at least {lost:,} steps of it are lost" if lost else ""
        run.events.info("begun_anew", step=0, message=f"Beginning anew at step 0: {why}{which}.", lost_steps=lost)
    return lost


def _load_start_weights(run: Run, learner: Learner, state: TrainingState, start: StartFrom) -> None:
    """Loads the model's variables, and the optimizer's where it is asked for."""
    path = RunDirectory(start.path).path
    found = find_on_chief(run, lambda: find_by_path(path, START_FROM, tell=run.events))
    optimizer = learner.optimizer if start.optimizer else None
    report = put_weights(run, learner.model, found, state=state, start=start, optimizer=optimizer)
    what = path if found.step is None else f"step {found.step:,} of {path}"
    run.events.info(
        "weights_loaded",
        message="\n    ".join([f"Beginning with the weights of {what}.", *shorten_list(list(report), MOST_SHOWN)]),
        path=path,
        variables=list(report),
    )


def check_weights(model: keras.Model, start: StartFrom, *, tell: EventLog) -> None:
    """Raises UserError where what `start_from` names does not fit a model; the model's variables may change.

    Args:
      model: built.
      start: which `check_start_from` let pass.
      tell: gets a warning of each damaged checkpoint that is passed over.
    """
    found = find_by_path(RunDirectory(start.path).path, START_FROM, tell=tell)
    load_weights(model, found, start=start)
