"""The gin roots: what `--mode=…` runs. Each reads from top to bottom as the story of a run.

Invariant: a run directory holds result.json only if the run ended well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfdist.backup.policy import BackupPolicy
from tfdist.data.batches import BatchPlan
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.strategies.base import Strategy
from tfdist.tasks.base import Task
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.result import RunResult, write_result
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training import accumulation, arguments, assembly, checks
from tfdist.training.best import check_keep_best, watched
from tfdist.training.boundaries import Boundaries, Length
from tfdist.training.callbacks import check_callbacks
from tfdist.training.compiled import parts_of
from tfdist.training.ending import Ending
from tfdist.training.hardware import describe_hardware
from tfdist.training.learner import ModelBuilder, OptimizerBuilder, build_learner, build_model, check_fit
from tfdist.training.metrics import MetricGroup
from tfdist.training.monitors import check_monitors
from tfdist.training.normalization import synchronized
from tfdist.training.optimizer import check_optimizer_builder
from tfdist.training.outcome import Outcome
from tfdist.training.place import Claim
from tfdist.training.precision import POLICIES, set_precision
from tfdist.training.randomness import set_seeds
from tfdist.training.recovery import Opened
from tfdist.training.reported import OBJECTIVE, reported_by
from tfdist.training.run import Request, Run, open_run
from tfdist.training.starts import read_starts
from tfdist.training.survival import check_start_from, checked_policy, open_recovery
from tfdist.training.tuned import XLA_CHOICES
from tfdist.training.weights import check_choice, find_exported
from tfdist.tuning import hypermodel

DataFunction = Callable[[], Any]


def train(
    *,
    request: Request,
    model: ModelBuilder,
    train_data: DataFunction,
    strategy: Strategy,
    global_batch_size: int,
    optimizer: OptimizerBuilder | None = None,
    task: Task | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    eval_data: DataFunction | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    stop_after_epochs: int | None = None,
    steps_per_epoch: int | None = None,
    initial_epoch: int = 0,
    seed: int = 0,
    deterministic: bool = False,
    precision: str = "float32",
    num_microbatches: int = 1,
    shuffle: bool = True,
    drop_remainder: bool = False,
    eval_batch_size: int | None = None,
    eval_every_steps: int | None = None,
    eval_every_epochs: int | Sequence[int] = 1,
    log_every_steps: int | None = None,
    steps_per_call: int | None = None,
    xla: str = "off",
    synchronize_batch_norm: bool = True,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    backup: BackupPolicy | str = "auto",
    accept_changes: bool = False,
    start_from: str | None = None,
    partial_restore: bool = False,
    must_report: str | None = None,
) -> RunResult | None:
    """Trains a model, evaluates and exports it.

    Args:
      request: from the command line.
      model: builds the model, inside the strategy's scope; `build(hp)` and a HyperModel of KerasTuner may stand here.
      train_data: gives the training examples.
      strategy: who computes.
      global_batch_size: examples of one step over all replicas.
      optimizer: builds the Keras optimizer, in the scope too; None takes that which the model is compiled with.
      task: what is learned; None takes the loss and metrics which the model is compiled with.
      hyperparameters: values for a model that takes `hp`, by their names there; those not given have their defaults.
      eval_data: gives the examples to evaluate on; None evaluates nothing.
      epochs: passes over the training examples; with `steps`, what comes first ends the run.
      steps: optimizer updates.
      stop_after_epochs: saves and leaves after so many epochs of the run, if that is not its end; a later start with a
        larger number, or without, goes on. Schedules are those of the whole run.
      steps_per_epoch: updates that count as an epoch; None takes one pass over the training examples. The passes go on
        through such epochs.
      initial_epoch: epochs that the model was trained for elsewhere; they count among `epochs`, and the run begins with
        the number after them.
      seed: of weights, order and dropout.
      deterministic: makes two runs on the same number of workers bit-identical, at some cost in speed.
      precision: "float32", "bfloat16" or "float16" (with loss scaling); variables are float32 always.
      num_microbatches: slices of a batch computed one after the other, for batches that do not fit in memory.
      shuffle: another order each epoch.
      drop_remainder: leaves out an epoch's last batch if it is smaller.
      eval_batch_size: examples of one evaluation step; None takes global_batch_size.
      eval_every_steps: None evaluates after each epoch.
      eval_every_epochs: of every so many epochs, or of those in a list, counted from 1; the end of the run is evaluated
        in any case.
      log_every_steps: more points in metrics.jsonl; None logs each epoch.
      steps_per_call: steps in one call of the compiled function; None finds out what takes 0.1 s.
      xla: "on", "off", or "auto", which tries both on the first batch.
      synchronize_batch_norm: computes the statistics of batch normalisation over the global batch, so that they do not
        depend on the number of replicas.
      callbacks: Keras callbacks.
      backup: when the run is saved and what is kept: "auto", "off", or a `BackupPolicy`. A run whose directory has a
        backup goes on from there.
      accept_changes: goes on although the settings that say what is trained are no longer those of the backup.
      start_from: weights to begin a new run with: another run's directory, one of its backups, or a .keras file.
      must_report: a metric, `val_NAME` for one of the evaluation, without which nothing is trained; what --mode=tune
        asks of its trials.
      partial_restore: takes of a backup or of `start_from` what fits, and leaves out what does not.

    Returns:
      What is written to result.json; None with `request.check_only` or `request.serve`, for a run that was finished
      before, and for one that `stop_after_epochs` left unfinished.

    Raises:
      UserError: something given is wrong.
      DivergedError: the loss or a gradient was not finite.
      PreemptedError: the process was told to leave, and has saved.
      NotSavedError: it was told to leave, and could not save.
    """
    arguments.check_counts(
        "train",
        {
            "epochs": epochs,
            "steps": steps,
            "stop_after_epochs": stop_after_epochs,
            "steps_per_epoch": steps_per_epoch,
            "global_batch_size": global_batch_size,
            "num_microbatches": num_microbatches,
            "eval_batch_size": eval_batch_size,
            "eval_every_steps": eval_every_steps,
            "log_every_steps": log_every_steps,
            "steps_per_call": steps_per_call,
        },
        needed=("global_batch_size", "num_microbatches"),
    )
    arguments.check_switches(
        "train",
        {
            "deterministic": deterministic,
            "shuffle": shuffle,
            "drop_remainder": drop_remainder,
            "synchronize_batch_norm": synchronize_batch_norm,
            "accept_changes": accept_changes,
            "partial_restore": partial_restore,
        },
    )
    arguments.check_epochs("train", initial_epoch=initial_epoch, eval_every_epochs=eval_every_epochs)
    arguments.check_seed("train.seed", seed)
    arguments.check_choice("train.precision", precision, POLICIES)
    arguments.check_choice("train.xla", xla, XLA_CHOICES)
    arguments.check_text("train.must_report", must_report, "val_accuracy")
    arguments.check_objects("train", strategy=strategy, task=task)
    model = hypermodel.as_builder(model, hyperparameters)
    arguments.check_functions(
        "train", {"model": model, "train_data": train_data, "eval_data": eval_data}, optional="eval_data"
    )
    if request.serve is not None:
        request.serve(train_data)
        return None
    if optimizer is not None:
        check_optimizer_builder(optimizer)
    check_callbacks(callbacks)
    policy = checked_policy(backup)
    check_start_from(start_from)
    if epochs is None and steps is None:
        raise UserError("train needs an end: write train.epochs = 10 or train.steps = 1000.")
    if stop_after_epochs is not None and policy is None:
        raise UserError("train.stop_after_epochs saves the run to go on later, and train.backup is 'off'. Remove one.")

    if request.inspect is not None:
        request.inspect(model, train_data)
        return None

    def plan_for(num_examples: int, num_replicas: int) -> BatchPlan:
        return BatchPlan(
            num_examples=num_examples,
            global_batch_size=global_batch_size,
            num_replicas=num_replicas,
            num_microbatches=num_microbatches,
            shuffle_seed=seed if shuffle else None,
            drop_remainder=drop_remainder,
            pad=strategy.needs_static_shapes,
        )

    if request.check_only:
        set_precision(precision)
        reported = checks.check_training(
            request.tell,
            strategy=strategy,
            model=model,
            optimizer=optimizer,
            task=task,
            train_data=train_data,
            eval_data=eval_data,
            plan=plan_for,
            eval_batch_size=eval_batch_size or global_batch_size,
            callbacks=callbacks,
            start_from=start_from,
            partial=partial_restore,
        )
        reported.check(OBJECTIVE, must_report)
        check_keep_best(policy, reported)
        return None

    if strategy.claims_devices():
        request.wait()
    length = Length(epochs, steps)
    claim = Claim(request.settings, length, keeps_backups=policy is not None, accept_changes=accept_changes)
    with open_run(request, strategy, mode="train", claim=claim) as run:
        if run.place.is_finished and not request.repeats_end:
            return None
        set_seeds(seed if request.seeds else None, deterministic=deterministic)
        set_precision(precision)
        source = assembly.open_source(run, train_data, "training")
        build, optimizer, task = parts_of(strategy, model, optimizer, task, source.structure)
        global_batch_size = getattr(model, "batch_size", None) or global_batch_size
        plan = plan_for(source.num_examples, run.topology.num_replicas)
        learner = build_learner(
            strategy,
            build,
            optimizer,
            task,
            source.structure,
            precision=precision,
            batch_size=global_batch_size,
        )
        reported = reported_by(learner.eval_metrics, task, evaluates=eval_data is not None)
        reported.check(OBJECTIVE, must_report)
        check_monitors(callbacks, reported, learner.optimizer)
        check_keep_best(policy, reported)
        if run.topology.is_chief:
            hypermodel.write(model, run.directory.path)
        plan = accumulation.made_up(run, learner, plan)
        assembly.note_microbatches(run, learner.model, plan)
        steps_per_epoch = steps_per_epoch or plan.steps_per_epoch
        boundaries = Boundaries(
            total_steps=length.total_steps(steps_per_epoch),
            steps_per_epoch=steps_per_epoch,
            eval_every_steps=eval_every_steps,
            eval_every_epochs=eval_every_epochs,
            log_every_steps=log_every_steps,
            pause_step=stop_after_epochs and stop_after_epochs * steps_per_epoch,
        )
        with synchronized(learner.model, strategy, wanted=synchronize_batch_norm):
            step = assembly.build_step(run, learner, task, source, plan, xla=xla, deterministic=deterministic)
            evaluator = assembly.build_evaluator(
                run,
                learner.model,
                learner.eval_metrics,
                task,
                eval_data,
                eval_batch_size or global_batch_size,
                checked=source.structure,
            )
            with open_recovery(
                run,
                learner,
                policy,
                steps_per_epoch=steps_per_epoch,
                start_from=start_from,
                partial=partial_restore,
                first_step=initial_epoch * steps_per_epoch,
            ) as opened:
                outcome, seconds = assembly.run_loop(
                    run,
                    learner,
                    task,
                    step,
                    evaluator,
                    source,
                    plan,
                    boundaries,
                    callbacks,
                    steps_per_call,
                    opened,
                    watched(policy, callbacks, evaluates=eval_data is not None),
                )
                ending = assembly.tell_ending(run, callbacks, outcome, boundaries)
                if not outcome.paused:
                    assembly.note_weightless(run, outcome)
                    assembly.evaluate_at_last(evaluator, outcome, opened.recovery)
                    assembly.export_model(run, learner.model)
            if evaluator is not None:
                evaluator.close()
        if outcome.paused:
            return _paused(run, outcome)
        return _conclude(run, plan, boundaries, outcome, ending, seconds, opened)


def _paused(run: Run, outcome: Outcome) -> None:
    run.events.info(
        "run_paused",
        step=outcome.step,
        message=f"saved at step {outcome.step:,}, as train.stop_after_epochs asks; {run.directory.path}",
    )


def _conclude(
    run: Run,
    plan: BatchPlan,
    boundaries: Boundaries,
    outcome: Outcome,
    ending: Ending,
    seconds: float,
    opened: Opened,
) -> RunResult:
    """Writes what a good end leaves behind; result.json last."""
    recovery, resumed_from_step = opened.recovery, opened.start.step if opened.start is not None else None
    backup_step = recovery.newest_step if recovery is not None else None
    if recovery is not None and run.topology.is_chief and backup_step != outcome.step:
        newest = "there is no backup" if backup_step is None else f"the newest backup is of step {backup_step:,}"
        run.events.warning(
            "end_not_saved",
            step=outcome.step,
            message=f"The training is done, but its state at step {outcome.step:,} could not be saved: {newest}. More "
            "epochs, should they be asked for, would begin from there.",
        )
    examples = plan.num_examples_until(outcome.step)
    result = RunResult(
        status="done",
        end_reason=ending.reason,
        stopped_by=ending.stopped_by,
        strategy=run.strategy.name,
        num_workers=run.topology.num_workers,
        num_replicas=run.topology.num_replicas,
        global_batch_size=plan.global_batch_size,
        steps=outcome.step,
        epochs=outcome.step // boundaries.steps_per_epoch,
        steps_per_epoch=boundaries.steps_per_epoch,
        examples_seen=examples,
        train_metrics=outcome.train_metrics,
        eval_metrics=outcome.eval_metrics,
        best=outcome.best,
        resumed_from_step=resumed_from_step,
        starts=read_starts(run.directory) if run.topology.is_chief else (),
        backup_step=backup_step,
        wall_seconds=seconds,
        examples_per_second=(examples - plan.num_examples_until(resumed_from_step or 0)) / seconds,
        hardware=describe_hardware(),
        notes=run.notes,
    )
    run.write_config()
    metrics = shown(outcome.eval_metrics) or shown(outcome.train_metrics)
    where = f"; {run.directory.model}" if run.request.keeps else ""
    run.events.info(
        "run_finished",
        step=outcome.step,
        message=f"done: {outcome.step:,} steps in {seconds:.1f} s; {metrics}{where}",
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


def evaluate(
    *,
    request: Request,
    model: ModelBuilder,
    data: DataFunction,
    strategy: Strategy,
    task: Task | None = None,
    global_batch_size: int = 256,
    precision: str = "float32",
    weights: str | int | None = None,
    backup: BackupPolicy | str = "auto",
) -> dict[str, Any] | None:
    """Evaluates a trained model: each example once, whatever the number of replicas.

    What has no value here has that of the training, if the configuration has one: `main.INHERITED` says whose.

    Args:
      request: from the command line.
      model: builds the model, as in training; one that takes `hp` gets the values of the run directory's training.
      data: gives the examples.
      strategy: who computes.
      task: gives loss and metrics; None takes those which the model is compiled with.
      global_batch_size: examples of one step over all replicas.
      precision: as in `train`.
      weights: "best" or "last" of the run's backups, the step of one, the directory of a backup or of a run, or a file
        in .keras or .weights.h5 format; None takes the run directory's export/model.keras.
      backup: of the training; its `keep_best` says which backup is the best one.

    Returns:
      Loss and metrics; evaluation.json gets them too, and what was evaluated. None with `request.check_only`.

    Raises:
      UserError: something given is wrong, or there are no such weights.
    """
    arguments.check_counts("evaluate", {"global_batch_size": global_batch_size}, needed=("global_batch_size",))
    arguments.check_choice("evaluate.precision", precision, POLICIES)
    arguments.check_objects("evaluate", strategy=strategy, task=task)
    if hypermodel.takes_hyperparameters(model):
        model = hypermodel.as_builder(model, (hypermodel.read(request.run_dir) or {}).get("values"))
    arguments.check_functions("evaluate", {"model": model, "data": data})
    check_choice(weights)
    policy = checked_policy(backup)
    if request.check_only:
        set_precision(precision)
        checks.check_evaluation(
            request.tell, strategy=strategy, model=model, task=task, data=data, batch_size=global_batch_size
        )
        return None
    if weights is None:
        find_exported(RunDirectory(request.run_dir))

    with open_run(request, strategy, mode="evaluate") as run:
        set_precision(precision)
        found = assembly.find_weights(run, weights, policy)
        source = assembly.open_source(run, data, None)
        if task is None:
            model, _, task = parts_of(strategy, model, None, None, source.structure)
        with strategy.scope():
            built = build_model(model, task, source.structure)
            metrics = MetricGroup(task.metric_specs())
            check_fit(built, task, source.structure, [metrics])
        assembly.put_weights(run, built, found)
        evaluator = assembly.build_evaluator(
            run, built, metrics, task, data, global_batch_size, checked=source.structure
        )
        results = evaluator.evaluate()
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
