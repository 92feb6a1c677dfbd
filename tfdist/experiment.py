"""What the command does with settings: trains, evaluates, or checks what of both can be checked.

Each function reads from top to bottom as its story. Invariant: a run directory holds result.json only if the run ended
well.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from tfdist.checkpoint import catalog
from tfdist.errors import DivergedError, OutOfMemoryError, UnreadableError
from tfdist.storage import files
from tfdist.telemetry.account import time_account
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.result import RunResult, versions, write_result
from tfdist.telemetry.stream import PAUSED
from tfdist.training.loop.learner import build_model, check_fit
from tfdist.training.loop.outcome import Ending, Outcome
from tfdist.training.recovery.recovery import Opened
from tfdist.training.recovery.rollback import Rollbacks
from tfdist.training.recovery.survival import check_start_from, open_recovery
from tfdist.training.run import assembly, course, model_files
from tfdist.training.run.assembly import Training
from tfdist.training.run.checking import checks
from tfdist.training.run.checking.fast_check import shortened
from tfdist.training.run.compiled import parts_of
from tfdist.training.run.directory.claim import Claim
from tfdist.training.run.directory.starts import read_starts
from tfdist.training.run.hardware import describe_hardware
from tfdist.training.run.run import Request, Run, open_run
from tfdist.training.run.settings import EvaluateSettings, TrainSettings
from tfdist.training.run.telling import goodput_so_far
from tfdist.training.step.metrics import MetricGroup
from tfdist.training.step.precision import set_precision
from tfdist.tuning.search import hypermodel


def train(settings: TrainSettings, request: Request) -> RunResult | None:
    """Trains a model, evaluates and exports it.

    Returns:
      What is written to result.json; None for a run that was finished before, and for one that
      `settings.stop_after_epochs` left unfinished.

    Raises:
      UserError: something given is wrong.
      DivergedError: the loss or a gradient was not finite.
      PreemptedError: the process was told to leave, and has saved.
      NotSavedError: it was told to leave, and could not save.
    """
    if settings.fast_check:
        _check_fast(settings, request)
        return None
    model, strategy = hypermodel.builder_of(settings), settings.strategy
    claim = Claim.of(settings, request.settings, begins_empty=request.begins_empty)
    check = functools.partial(check_start_from, settings.start_from, settings.start_from_names)
    opening = open_run(request, strategy, mode="train", claim=claim, check=check, to_tell=settings)
    with contextlib.ExitStack() as at_end, opening as run:
        if run.place.is_finished and not request.repeats_end:
            _clear_backup(run, settings, at_end)
            return None
        training = assembly.assemble(run, settings, model)
        if run.topology.is_chief:
            hypermodel.write(model, run.directory.path)
        with assembly.in_place(training):
            path, policy = run.directory.rollbacks, settings.on_divergence
            rollbacks = Rollbacks(strategy, path, policy, run.note, splits=settings.splits)
            trained = None
            while trained is None:  # once, unless a step fails and the run goes back
                trained = _trained(training, rollbacks)
        if trained.outcome.paused:
            run.stream.status = PAUSED
            _tell_paused(run, trained.outcome)
            return None
        result = _conclude(training, trained)
        _clear_backup(run, settings, at_end)
        return result


def _clear_backup(run: Run, settings: TrainSettings, at_end: contextlib.ExitStack) -> None:
    """Removes a finished run's checkpoints where a BackupAndRestore asks for it, and at the end their directory."""
    backup, directory = settings.backup, run.directory.checkpoints
    if backup is None or not backup.delete_checkpoint or not run.topology.is_chief:
        return
    try:
        catalog.remove_all(directory)
    except OSError as error:
        run.events.warning("checkpoint_not_removed", message=f"{directory} could not be cleared: {error}")
    if not files.is_remote(directory):
        at_end.enter_context(contextlib.suppress(OSError))  # of a directory that holds something else
        at_end.callback(os.rmdir, directory)


def _check_fast(settings: TrainSettings, request: Request) -> None:
    """Trains two steps and everything around them, and leaves nothing."""
    short, apart = shortened(settings, request)
    result = train(short, apart)
    if settings.strategy.topology.is_chief:
        files.remove_tree(apart.run_dir)
        metrics = "" if result is None else shown(dict(result.eval_metrics or result.train_metrics))
        apart.console(True).message(f"fast check: all parts of the training have run; {metrics}")


class _Trained(NamedTuple):
    opened: Opened
    outcome: Outcome
    ending: Ending
    seconds: float
    num_microbatches: int


def _trained(training: Training, rollbacks: Rollbacks) -> _Trained | None:
    """Trains from the newest checkpoint to the end, evaluates and exports; None where a step has failed."""
    training = assembly.cut(training, rollbacks.microbatches)
    run, learner = training.run, training.learner
    rollbacks.apply(learner.optimizer)
    try:
        step = assembly.build_step(training, rollbacks.skipped)
        evaluator = assembly.build_evaluator(training)
        with open_recovery(training) as opened:
            if rollbacks.arrived(opened.start, learner.optimizer):
                step = assembly.build_step(training, rollbacks.skipped)
            outcome, seconds = course.run_loop(training, step, evaluator, opened, rollbacks=rollbacks)
            ending = course.tell_ending(training, outcome)
            if not outcome.paused:
                course.note_weightless(run, outcome)
                course.renew_statistics(training, outcome)
                course.evaluate_at_last(evaluator, outcome, opened.recovery)
                if learner.shards is not None:
                    learner.shards.make_whole(keep=run.topology.is_chief)
                model_files.export_model(run, learner.model)
    except (DivergedError, OutOfMemoryError, UnreadableError) as error:
        rollbacks.note(error, found=lambda unreadable: assembly.found(training, unreadable))
        run.metrics.close()  # whose last points go when the run is back
        return None
    if evaluator is not None:
        evaluator.close()
    return _Trained(opened, outcome, ending, seconds, training.plan.num_microbatches)


def validate(settings: TrainSettings, tell: Callable[[str], None]) -> None:
    """Checks all of a training that can be checked without a step, and tells in lines what it finds.

    Raises:
      UserError: something given is wrong.
    """
    model = hypermodel.builder_of(settings)
    check_start_from(settings.start_from, settings.start_from_names)
    checks.check_training(settings, model, tell)


def _tell_paused(run: Run, outcome: Outcome) -> None:
    run.events.info(
        "run_paused",
        step=outcome.step,
        message=f"saved at step {outcome.step:,}, as train.stop_after_epochs asks; {run.directory.path}",
    )


def _conclude(training: Training, trained: _Trained) -> RunResult:
    """Writes what a good end leaves behind; result.json last."""
    opened, outcome, ending, seconds, num_microbatches = trained
    run, plan = training.run, training.plan
    recovery, resumed_from_step = opened.recovery, opened.start.step if opened.start is not None else None
    checkpoint_step = recovery.newest_step if recovery is not None else None
    backup = training.settings.backup
    if recovery is not None and run.topology.is_chief and checkpoint_step != outcome.step:
        newest = (
            "there is no checkpoint"
            if checkpoint_step is None
            else f"the newest checkpoint is of step {checkpoint_step:,}"
        )
        run.events.warning(
            "end_not_saved",
            step=outcome.step,
            message=f"The training is done, but its state at step {outcome.step:,} could not be saved: {newest}. More "
            "epochs, should they be asked for, would begin from there.",
        )
    examples = plan.num_examples_until(outcome.step)
    starts = read_starts(run.directory, run.warn_of_file).starts if run.topology.is_chief else ()
    result = RunResult(
        status="done",
        end_reason=ending.reason,
        stopped_by=ending.stopped_by,
        strategy=run.strategy.name,
        num_workers=run.topology.num_workers,
        num_replicas=run.topology.num_replicas,
        global_batch_size=plan.global_batch_size,
        steps=outcome.step,
        epochs=outcome.step // training.boundaries.steps_per_epoch,
        steps_per_epoch=training.boundaries.steps_per_epoch,
        examples_seen=examples,
        train_metrics=outcome.train_metrics,
        eval_metrics=outcome.eval_metrics,
        best=outcome.best,
        resumed_from_step=resumed_from_step,
        starts=starts,
        goodput=goodput_so_far(run.facts, starts),
        seconds=time_account.current().seconds(),
        checkpoint_step=None if backup is not None and backup.delete_checkpoint else checkpoint_step,
        wall_seconds=seconds,
        examples_per_second=(examples - plan.num_examples_until(resumed_from_step or 0)) / seconds,
        hardware=describe_hardware(),
        notes=run.notes,
        versions=versions(),
    )
    run.write_config({"train.num_microbatches": num_microbatches} if training.settings.splits else None)
    metrics = shown(outcome.eval_metrics) or shown(outcome.train_metrics)
    where = f"; {run.directory.model}" if run.request.keeps else ""
    run.events.info(
        "run_finished",
        step=outcome.step,
        message=f"done: {checks.counted(outcome.step, 'step')} in {seconds:.1f} s; {metrics}{where}",
        stopped_early=outcome.stopped_early,
    )
    if run.topology.is_chief:
        write_result(run.directory, result)
    return result


def shown(metrics: dict[str, Any]) -> str:
    """Metrics in a line."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )


def evaluate(settings: EvaluateSettings, request: Request) -> dict[str, Any]:
    """Evaluates a trained model: each example once, whatever the number of replicas.

    Returns:
      Loss and metrics; evaluation.json gets them too, and what was evaluated.

    Raises:
      UserError: something given is wrong, or there are no such weights.
    """
    task, strategy = settings.task, settings.strategy
    check = functools.partial(model_files.check_exported, request.run_dir, settings.weights)
    with open_run(request, strategy, mode="evaluate", check=check) as run:
        model = hypermodel.builder_of_trained(settings, request.run_dir, strategy)
        set_precision(settings.precision)
        found = model_files.find_weights(run, settings.weights, settings.policy, setting="evaluate.weights")
        source = assembly.open_source(run, settings.data, "evaluation")
        if task is None:
            model, _, task = parts_of(strategy, model, None, None, source.structure)
        with strategy.scope():
            built = build_model(model, task, source.structure)
            metrics = MetricGroup(task.metric_specs())
            check_fit(built, task, source.structure, [metrics])
        model_files.put_weights(run, built, found)
        evaluator = assembly.evaluator_of(run, built, metrics, task, source, settings.global_batch_size)
        results = evaluator.evaluate()
        assert results is not None  # nothing asks it to leave
        evaluator.close()
        if run.topology.is_chief:
            evaluated = {
                "weights": found.path,
                "step": found.step,
                "data": request.settings().get("evaluate.data"),
                "num_examples": source.num_examples,
                "strategy": strategy.name,
                "num_replicas": run.topology.num_replicas,
            }
            files.write_atomic(run.directory.evaluation, to_json(results | {"evaluated": evaluated}, indent=2) + "\n")
        run.events.info("evaluated", message=f"{found.described()}: {shown(results)}", **results)
        return results


def validate_evaluation(settings: EvaluateSettings, run_dir: str, tell: Callable[[str], None]) -> None:
    """As `validate`, for an evaluation of what `run_dir` holds."""
    checks.check_evaluation(settings, hypermodel.builder_of_trained(settings, run_dir), tell)
