"""A training that is put together, from its first step or its checkpoint to result.json: the order of a run."""

from __future__ import annotations

import collections
import contextlib
import os
import time
from typing import Any

import tensorflow as tf

from tfdist.data.pipeline import dispose
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.troubles import explain_failure
from tfdist.tasks.task import OwnSteps
from tfdist.telemetry.account import time_account
from tfdist.telemetry.account.sampler import list_local_devices
from tfdist.telemetry.console.console_text import TrainingPlan, count_text
from tfdist.telemetry.facts import Point
from tfdist.telemetry.metrics_log import FINAL
from tfdist.telemetry.records import Unreadable, read_events
from tfdist.telemetry.result import RunResult, check_targets, read_starts, record_start, versions, write_result
from tfdist.telemetry.sinks.sink import PAUSED
from tfdist.training.loop.boundaries import Outcome, Vote, suspects_of_stop
from tfdist.training.loop.callbacks import Callbacks
from tfdist.training.loop.evaluation import EvaluatorGroup, renew_batch_statistics
from tfdist.training.loop.loop import Loop
from tfdist.training.recovery.recovery import RecoveryStart
from tfdist.training.recovery.rollback import Rollbacks
from tfdist.training.recovery.survival import open_recovery
from tfdist.training.recovery.weights import export_model
from tfdist.training.run import assembly
from tfdist.training.run.assembly import Training
from tfdist.training.run.compiled import CallbackModel
from tfdist.training.run.run import goodput_so_far, measure_gpus
from tfdist.training.step.normalization import batch_norm_layers
from tfdist.training.step.own_step import refuse_padding
from tfdist.training.watch.profiler import Profiler


class Trainer:
    """Trains once, with the settings that the failures so far have brought.

    Args:
      training: put together.
      rollbacks: of the run.
    """

    def __init__(self, training: Training, rollbacks: Rollbacks) -> None:
        self._training = training
        self._rollbacks = rollbacks

    def train(self) -> RunResult | None:
        """Trains from the newest checkpoint to the end, evaluates and exports; None for a run that pauses.

        Raises:
          DivergedError, OutOfMemoryError: a step has failed.
          PreemptedError, NotSavedError: the process was told to leave.
        """
        training, run, shards = self._training, self._training.run, self._training.learner.shards
        if isinstance(training.task, OwnSteps):
            refuse_padding(training.plan)
        step = assembly.build_step(training)
        evaluator = assembly.build_evaluator(training)
        with open_recovery(training) as opened:
            first_step = opened.start.step if opened.start else 0
            profiler = Profiler(run, training.boundaries.total_steps)
            callbacks = self._build_callbacks(first_step if opened.start is not None and opened.start.values else None)
            self._record_start(opened, first_step)
            loop = Loop(training, opened, step, evaluator, callbacks, profiler)
            started = time.perf_counter()
            try:
                with profiler:
                    outcome = loop.run()
            finally:
                run.console.close()  # the last epoch is shown before what ended the training is said
            seconds, learning_rate = time.perf_counter() - started, loop.learning_rate
            loop.close()  # before the model is evaluated and exported
            del loop
            stopped_by = self._report_stop(outcome)
            if not outcome.paused:
                self._log_weightless_steps(outcome)
                self._renew_statistics(outcome)
                self._evaluate_final_weights(evaluator, outcome, opened, learning_rate)
                if shards is not None:
                    shards.gather_to_chief(keep=run.topology.is_chief)
                exported = self._export_model(opened, outcome.step)
        if evaluator is not None:
            evaluator.close()
        if outcome.paused:
            run.stream.status = PAUSED
            message = f"saved at step {outcome.step:,}, as train.stop_after_epochs asks; {run.directory.path}"
            run.events.info("run_paused", step=outcome.step, message=message)
            return None
        return self._conclude(opened, outcome, stopped_by, seconds, exported)

    def _record_start(self, opened: RecoveryStart, first_step: int) -> None:
        """Adds this start to run.json, and tells the console how far the run goes."""
        run, boundaries = self._training.run, self._training.boundaries
        if run.topology.is_chief and not self._rollbacks.has_gone_back:
            settings, lost = run.request.settings(), opened.lost_steps
            record_start(run.directory, settings, run.earlier_starts, step=first_step, lost_steps=lost)
        run.console.start(
            TrainingPlan(
                total_epochs=max(boundaries.num_epochs, -(-first_step // boundaries.steps_per_epoch)),
                steps_per_epoch=boundaries.steps_per_epoch,
                total_steps=max(boundaries.total_steps, first_step),
            )
        )

    def _build_callbacks(self, resumed_from_step: int | None) -> Callbacks:
        """The training's callbacks, told of the step that it resumes from; says where they make calls short."""
        training, run, boundaries = self._training, self._training.run, self._training.boundaries
        given = training.settings.callbacks
        callbacks = Callbacks(
            given,
            model=training.learner.model,
            optimizer=training.learner.optimizer,
            strategy=run.strategy,
            compiled=CallbackModel(training.learner, training.task).compiled_for_hooks
            if given
            else contextlib.nullcontext,
            params={"epochs": boundaries.num_epochs, "steps": boundaries.steps_per_epoch, "verbose": 0}
            | ({} if resumed_from_step is None else {"resumed_from_step": resumed_from_step}),
        )
        if names := callbacks.act_on_batches:
            run.events.info(
                "calls_of_one_step",
                message=f"{', '.join(names)} {'acts' if len(names) == 1 else 'act'} on each batch: every step is a "
                "call of its own, which costs time where steps are short.",
                callbacks=list(names),
            )
        return callbacks

    def _report_stop(self, outcome: Outcome) -> str | None:
        """Says where a callback ended the loop; the callback's class, if it can be told."""
        training, boundaries = self._training, self._training.boundaries
        if not outcome.stopped_early:
            return None
        names = suspects_of_stop(training.settings.callbacks)
        training.run.events.info(
            "stopped_early",
            step=outcome.step,
            message=f"{' or '.join(names) or 'A callback'} stopped the training at step {outcome.step:,} of "
            f"{boundaries.total_steps:,}, the end of epoch {boundaries.epoch_of(outcome.step)}.",
            best=outcome.best,
        )
        return names[0] if len(names) == 1 else None

    def _log_weightless_steps(self, outcome: Outcome) -> None:
        """Says, and leaves for result.json, how many steps changed nothing, as nothing had any weight."""
        count = outcome.weightless
        if count:
            steps, they, them = ("1 step", "it", "it") if count == 1 else (f"{count:,} steps", "they", "them")
            self._training.run.note(
                "weightless_steps",
                f"{steps} had examples that weigh nothing in all; {they} changed nothing, and the logged loss leaves "
                f"{them} out.",
            )

    def _renew_statistics(self, outcome: Outcome) -> None:
        """Takes batch statistics anew of weights that `train.swa_start` averages; no evaluation has seen them yet."""
        training, run, learner, plan = self._training, self._training.run, self._training.learner, self._training.plan
        if training.settings.swa_start is None or not batch_norm_layers(learner.model):
            return
        iterator = assembly.stream(run, training.source, plan)
        sizes = {"steps": plan.steps_per_epoch, "batch_size": plan.global_batch_size}
        renew_batch_statistics(run.strategy, learner.model, training.task, iterator, **sizes)
        dispose(iterator)
        outcome.evaluated_at = -1

    def _evaluate_final_weights(
        self, evaluator: EvaluatorGroup | None, outcome: Outcome, opened: RecoveryStart, learning_rate: float
    ) -> None:
        """Evaluates what is kept, where its weights are not those of the last evaluation, and logs that as FINAL.

        Raises:
          PreemptedError, NotSavedError: the process was told to leave. The loop has saved all that this is made of.
        """
        recovery, training = opened.recovery, self._training
        if evaluator is not None and outcome.evaluated_at != outcome.step:
            results = evaluator.evaluate(Vote if recovery is None else lambda: recovery.votes(outcome.step))
            if results is None:
                assert recovery is not None
                recovery.leave(outcome.step)
            outcome.eval_metrics, outcome.evaluated_at = results, outcome.step
            epoch = training.boundaries.epoch_of(outcome.step)
            training.run.metrics.log(
                Point(step=outcome.step, epoch=epoch, split=FINAL, metrics=results, learning_rate=learning_rate)
            )

    def _export_model(self, opened: RecoveryStart, step: int) -> str:
        """Exports the trained model; its path. Where the store does not take it, the error says what is lost."""
        training = self._training
        try:
            return export_model(training.run, training.learner.model, training.task.inputs(training.source.structure))
        except OSError as error:
            cause, recovery = explain_failure(error), opened.recovery
            if cause is None or recovery is None or recovery.newest_step == step:
                raise
            raise UserError(f"The trained model could not be stored. {cause} {recovery.describe_loss(step)}") from error

    def _check_targets(self, rate: float) -> dict[str, Any]:
        """Compares this process with the plan in the run directory."""
        run, seconds = self._training.run, time_account.current().seconds()
        if not (run.topology.is_chief and files.exists(run.directory.plan)):
            return {}
        overhead = seconds["checkpoint"] / sum(seconds.values())
        measured = {"throughput": rate, "checkpoint_overhead": overhead, "gpu_utilization": measure_gpus(run.facts)}
        return check_targets(run.directory, measured)

    def _describe_restarts(self) -> list[str]:
        """Says how often the launcher has started the run again."""
        run = self._training.run
        events = read_events(run.directory, Unreadable()) if run.topology.is_chief and run.earlier_starts else []
        count = sum(event.name == "restarted" for event in events)
        return [f"The result was reached with {count_text(count, 'restart')} after workers failed."] if count else []

    def _conclude(
        self, opened: RecoveryStart, outcome: Outcome, stopped_by: str | None, seconds: float, exported: str
    ) -> RunResult:
        """Writes what a good end leaves behind; result.json last. `exported` is the path of the trained model."""
        training, run, plan = self._training, self._training.run, self._training.plan
        backup = training.settings.backup
        resumed_from_step = opened.start.step if opened.start is not None else None
        checkpoint_step = opened.recovery.newest_step if opened.recovery is not None else None
        examples = plan.num_examples_until(outcome.step)
        starts = read_starts(run.directory, run.warn_of_file).starts if run.topology.is_chief else ()
        rate = (examples - plan.num_examples_until(resumed_from_step or 0)) / seconds
        result = RunResult(
            status="done",
            end_reason="early_stopping" if outcome.stopped_early else "completed",
            stopped_by=stopped_by,
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
            examples_per_second=rate,
            hardware=describe_hardware(),
            performance_targets=self._check_targets(rate),
            notes=[*run.notes, *self._rollbacks.describe(), *self._describe_restarts()],
            versions=versions(),
        )
        note = f"# train.num_microbatches = {plan.num_microbatches} is what fitted into memory.\n"
        run.write_config(note if self._rollbacks.microbatches > 1 else "")
        metrics = format_metrics(outcome.eval_metrics) or format_metrics(outcome.train_metrics)
        where = f"; {exported}" if run.request.keeps else ""
        run.events.info(
            "run_finished",
            step=outcome.step,
            message=f"done: {count_text(outcome.step, 'step')} in {seconds:.1f} s; {metrics}{where}",
            stopped_early=outcome.stopped_early,
        )
        if run.topology.is_chief:
            write_result(run.directory, result)
        return result


def format_metrics(metrics: dict[str, Any]) -> str:
    """Formats metrics as a line."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )


def describe_hardware() -> dict[str, Any]:
    """Returns the chief's devices by kind, their names, its processors by affinity, and bytes of memory."""
    kinds = collections.Counter(name.partition(":")[0] for name in list_local_devices())
    accelerators = [device for device in tf.config.get_visible_devices() if device.device_type != "CPU"]
    names = [tf.config.experimental.get_device_details(device).get("device_name") for device in accelerators]
    return {
        "devices": dict(sorted(kinds.items())),
        "accelerators": dict(collections.Counter(name for name in names if name)),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
