"""What the command does with settings: trains, evaluates, or checks what of both can be checked.

Each function reads from top to bottom as its story. Invariant: a run directory holds result.json only if the run ended
well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

from tfdist.checkpoint import catalog
from tfdist.checkpoint.callback_state import Baseline
from tfdist.errors import DivergedError, OutOfMemoryError, UserError
from tfdist.keras_patches.patches import Patches
from tfdist.storage import files
from tfdist.tasks.task import OwnSteps
from tfdist.telemetry.console.progress_bar import open_console
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.result import RunResult
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.loop.learner import build_model, check_metric_sums
from tfdist.training.recovery.rollback import Rollbacks
from tfdist.training.recovery.survival import check_start_from
from tfdist.training.recovery.weights import SavedWeights, check_exported, find_weights, put_weights
from tfdist.training.run import assembly, validate_run
from tfdist.training.run.compiled import parts_of
from tfdist.training.run.follower import CheckpointFollower
from tfdist.training.run.request import Request
from tfdist.training.run.run import FOLLOW, Run, open_run
from tfdist.training.run.train_settings import EvaluateSettings, TrainSettings
from tfdist.training.run.trainer import Trainer, format_metrics
from tfdist.training.run.validate_run import shorten
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
    check = functools.partial(check_start_from, settings.start)
    opening = open_run(request, strategy, mode="train", settings=settings, check=check)
    with contextlib.ExitStack() as at_end, opening as run:
        if run.claim.is_finished and not request.repeats_end:
            _clear_backup(run, settings, at_end)
            return None
        rollbacks = Rollbacks(strategy, run.directory.rollbacks, settings.rollback, run.events)
        baseline = Baseline(settings.callbacks if settings.rollback is not None else ())
        while True:  # once, unless a step fails and the run goes back
            try:
                with Patches() as patches:
                    training = assembly.assemble(run, settings, model, patches, rollbacks)
                    if run.topology.is_chief and isinstance(model, hypermodel.HyperModel):
                        model.write(run.directory.path)
                    result = Trainer(training, rollbacks).train()
                    break
            except (DivergedError, OutOfMemoryError) as error:
                rollbacks.record(error)
                run.metrics.close()  # whose last points go when the run is back
                baseline.reset()
            del training, patches  # the failed attempt's memory
        if result is not None:
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
    """Trains two steps and everything around them, restores and compares what it saved, and leaves nothing."""
    short, apart = shorten(settings, request)
    result = train(short, apart)
    is_chief, directory = settings.strategy.topology.is_chief, RunDirectory(apart.run_dir)
    restored = ""
    if short.policy is not None:
        trained = validate_run.read_exported_weights(directory) if is_chief else {}
        quiet = dataclasses.replace(
            apart, begins_empty=False, repeats_end=True, console=lambda _: open_console(is_chief=False)
        )
        train(short, quiet)  # from the checkpoint, by a model that is built again
        if is_chief:
            validate_run.compare_weights(trained, validate_run.read_exported_weights(directory))
            restored = f"a checkpoint gave back all {len(trained)} weights; "
    if is_chief:
        files.remove_tree(apart.run_dir)
        metrics = "" if result is None else format_metrics(dict(result.eval_metrics or result.train_metrics))
        apart.console(True).message(f"fast check: all parts of the training have run; {restored}{metrics}")


def validate(settings: TrainSettings, tell: Callable[[str], None]) -> None:
    """Checks all of a training that can be checked without a step, and tells in lines what it finds.

    Args:
      settings: of the training.
      tell: gets the lines.

    Raises:
      UserError: something given is wrong.
    """
    model = hypermodel.builder_of(settings)
    check_start_from(settings.start)
    validate_run.check_training(settings, model, tell)


def evaluate(settings: EvaluateSettings, request: Request) -> dict[str, Any]:
    """Evaluates a trained model: each example once, whatever the number of replicas.

    Returns:
      Loss and metrics; evaluation.json gets them too, and what was evaluated.

    Raises:
      UserError: something given is wrong, or there are no such weights.
    """
    check = functools.partial(check_exported, request.run_dir, settings.weights)
    opening = open_run(request, settings.strategy, mode="evaluate", check=check)
    with contextlib.ExitStack() as at_end, opening as run:
        found = find_weights(run, settings.weights, settings.policy, setting="evaluate.weights")
        return _build_evaluation(run, settings, at_end)(found)


def follow(settings: EvaluateSettings, request: Request) -> None:
    """Evaluates each checkpoint of a run while it trains, and returns when it has ended and all are evaluated.

    metrics-follow.jsonl gets a point for each, and evaluation.json the last one.

    Raises:
      UserError: something given is wrong.
    """
    if settings.weights is not None:
        raise UserError(
            f"evaluate.weights is {settings.weights!r}, and --follow evaluates each checkpoint. Leave one of them out."
        )
    with contextlib.ExitStack() as at_end, open_run(request, settings.strategy, mode=FOLLOW) as run:
        follower = CheckpointFollower(run, settings.policy, only_newest=settings.only_newest)
        at_end.callback(follower.close)
        evaluate_weights: Callable[[SavedWeights], dict[str, Any]] | None = None
        while (weights := follower.wait_for_next()) is not None:
            evaluate_weights = evaluate_weights or _build_evaluation(run, settings, at_end)
            follower.record(weights, evaluate_weights(weights))


def _build_evaluation(
    run: Run, settings: EvaluateSettings, at_end: contextlib.ExitStack
) -> Callable[[SavedWeights], dict[str, Any]]:
    """Builds the model of a run, and what evaluates it with some weights; evaluation.json gets the results."""
    task, strategy = settings.task, settings.strategy
    model = hypermodel.builder_of_trained(settings, run.request.run_dir, strategy)
    set_precision(settings.precision)
    sets = assembly.open_eval_sets(run, settings.eval_sets)
    structure = next(source.structure for source, _ in sets.values())
    if task is None:
        model, _, task = parts_of(strategy, model, None, None, structure)
    with strategy.scope():
        built = model() if isinstance(task, OwnSteps) else build_model(model, task, structure)
    if not isinstance(task, OwnSteps):
        check_metric_sums(built, task, structure, run.topology.num_replicas)
    evaluator = assembly.evaluator_of(run, built, task, sets, Patches())
    at_end.callback(evaluator.close)

    def evaluate_weights(weights: SavedWeights) -> dict[str, Any]:
        put_weights(run, built, weights)
        results = evaluator.evaluate()
        assert results is not None  # nothing asks it to leave
        if run.topology.is_chief:
            evaluated = {
                "weights": weights.path,
                "step": weights.step,
                "data": run.request.settings().get("evaluate.data"),
                "num_examples": sum(source.num_examples for source, _ in sets.values()),
                "strategy": strategy.name,
                "num_replicas": run.topology.num_replicas,
            }
            files.write_atomic(run.directory.evaluation, to_json(results | {"evaluated": evaluated}, indent=2) + "\n")
        run.events.info("evaluated", message=f"{weights.describe()}: {format_metrics(results)}", **results)
        return results

    return evaluate_weights


def validate_evaluation(settings: EvaluateSettings, run_dir: str, tell: Callable[[str], None]) -> None:
    """Checks an evaluation of `run_dir`'s weights, as `validate` checks a training."""
    validate_run.check_evaluation(settings, hypermodel.builder_of_trained(settings, run_dir), tell)
