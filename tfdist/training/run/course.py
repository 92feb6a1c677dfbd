"""The loop of a training that is put together, from its first step or its checkpoint to what is kept at its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from tfdist.data.pipeline.input_hints import hint_for
from tfdist.data.pipeline.pipeline import dispose
from tfdist.telemetry.console.console_text import Plan
from tfdist.telemetry.reporter import Reporter
from tfdist.training.loop import batch_statistics
from tfdist.training.loop.best import watched
from tfdist.training.loop.callback_model import CallbackModel
from tfdist.training.loop.callbacks import Callbacks
from tfdist.training.loop.evaluation import Evaluator
from tfdist.training.loop.loop import Loop
from tfdist.training.loop.outcome import Ending, Outcome, ending_of, no_votes
from tfdist.training.recovery.recovery import Opened, Recovery
from tfdist.training.recovery.rollback import Rollbacks
from tfdist.training.run import assembly
from tfdist.training.run.assembly import Training
from tfdist.training.run.directory.starts import note_start
from tfdist.training.run.run import Run
from tfdist.training.run.same_batches import compare_batches, summarize_batch
from tfdist.training.step.layers.normalization import batch_norm_layers
from tfdist.training.step.step import TrainStep
from tfdist.training.watch.equality import Equality
from tfdist.training.watch.pace import Pace
from tfdist.training.watch.profiler import Profiler


def run_loop(
    training: Training,
    step: TrainStep,
    evaluator: Evaluator | None,
    opened: Opened,
    *,
    rollbacks: Rollbacks,
) -> tuple[Outcome, float]:
    """Trains to the end, from the checkpoint if there is one; the outcome, and the seconds it took."""
    run, learner, plan, boundaries = training.run, training.learner, training.plan, training.boundaries
    first_step = opened.start.step if opened.start else 0
    num_epochs = -(-boundaries.total_steps // boundaries.steps_per_epoch)
    examples_per_step = plan.num_examples_until(plan.steps_per_epoch) / plan.steps_per_epoch
    if run.request.profile is not None:
        run.request.profile.check(boundaries.total_steps)
    profiler = Profiler(run.directory, run.topology, run.events, asked=run.request.profile, hears=run.request.keeps)
    iterator = assembly.stream(run, training.source, plan, first_step=first_step, left_out=rollbacks.skipped)
    hooks = _hooks(training, num_epochs)
    if run.topology.is_chief and not rollbacks.has_gone_back:
        settings, lost = run.request.settings(), opened.lost_steps
        note_start(run.directory, settings, run.earlier_starts, step=first_step, lost_steps=lost)
    reporter = Reporter(
        console=run.console,
        metrics=run.metrics,
        events=run.events,
        examples_per_step=examples_per_step,
    )
    loop = Loop(
        strategy=run.strategy,
        step=step,
        xla_trial=assembly.xla_trial(training, step, rollbacks.skipped),
        iterator=iterator,
        evaluator=evaluator,
        callbacks=hooks,
        reporter=reporter,
        boundaries=boundaries,
        pace=Pace(run.strategy, 1 if hooks.act_on_batches else training.settings.steps_per_call),
        optimizer=learner.optimizer,
        loss_scale=learner.loss_scale,
        recovery=opened.recovery,
        equality=None if run.topology.num_workers == 1 else _equality(training, opened, reporter),
        start=opened.start,
        watched=watched(training.settings),
        input_hint=hint_for(training.source),
        skipped=rollbacks.skipped,
        saves_at_begin=rollbacks.is_possible,
        spike=rollbacks.spike,
        profiler=profiler,
    )
    run.console.start(
        Plan(total_epochs=num_epochs, steps_per_epoch=boundaries.steps_per_epoch, total_steps=boundaries.total_steps)
    )
    started = time.perf_counter()
    try:
        with profiler:
            outcome = loop.run()
    finally:
        run.console.close()  # the last epoch is shown before what ended the training is said
    seconds = time.perf_counter() - started
    dispose(iterator)
    return outcome, seconds


def _equality(training: Training, opened: Opened, reporter: Reporter) -> Equality:
    strategy, source = training.run.strategy, training.source

    def compare_data() -> None:
        batch = source.first_batch()
        if batch is not None:
            compare_batches(strategy, summarize_batch(batch), "training")

    return Equality(strategy, opened.state.replicated, reporter, compare_data)


def _hooks(training: Training, num_epochs: int) -> Callbacks:
    """The training's callbacks; says where they make calls short."""
    run, callbacks = training.run, training.settings.callbacks
    hooks = Callbacks(
        callbacks,
        model=training.learner.model,
        optimizer=training.learner.optimizer,
        strategy=run.strategy,
        compiled=CallbackModel(training.learner, training.task).in_place if callbacks else contextlib.nullcontext,
        params={"epochs": num_epochs, "steps": training.boundaries.steps_per_epoch, "verbose": 0},
    )
    if hooks.act_on_batches:
        _tell_of_short_calls(run, hooks.act_on_batches)
    return hooks


def note_weightless(run: Run, outcome: Outcome) -> None:
    """Says, and leaves for result.json, how many steps changed nothing, as nothing had any weight."""
    if outcome.weightless:
        count = outcome.weightless
        steps, they, them = ("1 step", "it", "it") if count == 1 else (f"{count:,} steps", "they", "them")
        run.note(
            "weightless_steps",
            f"{steps} had examples that weigh nothing in all; {they} changed nothing, and the logged loss leaves "
            f"{them} out.",
        )


def tell_ending(training: Training, outcome: Outcome) -> Ending:
    """How the loop ended; what a callback ended is said."""
    ending = ending_of(
        training.settings.callbacks,
        stopped=outcome.stopped_early,
        step=outcome.step,
        epoch=-(-outcome.step // training.boundaries.steps_per_epoch),
        total_steps=training.boundaries.total_steps,
    )
    if ending.message:
        training.run.events.info("stopped_early", step=outcome.step, message=ending.message, best=outcome.best)
    return ending


def _tell_of_short_calls(run: Run, names: Sequence[str]) -> None:
    run.events.info(
        "calls_of_one_step",
        message=f"{', '.join(names)} {'acts' if len(names) == 1 else 'act'} on each batch: every step is a call of its "
        "own, which costs time where steps are short.",
        callbacks=list(names),
    )


def renew_statistics(training: Training, outcome: Outcome) -> None:
    """Takes batch statistics anew where the settings ask for it; the last evaluation was then of another model."""
    run, learner, plan = training.run, training.learner, training.plan
    if not training.settings.renew_batch_statistics or not batch_norm_layers(learner.model):
        return
    iterator = assembly.stream(run, training.source, plan)
    sizes = {"steps": plan.steps_per_epoch, "batch_size": plan.global_batch_size}
    batch_statistics.renew(run.strategy, learner.model, training.task, iterator, **sizes)
    dispose(iterator)
    outcome.evaluated_at = -1


def evaluate_at_last(evaluator: Evaluator | None, outcome: Outcome, recovery: Recovery | None = None) -> None:
    """Evaluates what is kept, where its weights are not those of the last evaluation.

    Raises:
      PreemptedError, NotSavedError: the process was told to leave. The loop has saved all that this is made of.
    """
    if evaluator is not None and outcome.evaluated_at != outcome.step:
        results = evaluator.evaluate(no_votes if recovery is None else lambda: recovery.votes(outcome.step))
        if results is None:
            assert recovery is not None
            recovery.leave(outcome.step)
        outcome.eval_metrics, outcome.evaluated_at = results, outcome.step
