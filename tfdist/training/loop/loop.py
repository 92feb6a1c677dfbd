"""The training loop: calls of K steps, and what happens between them.

Invariant: where a call ends does not change what is trained. Boundaries (the end of an epoch, an evaluation, a logged
point, the end of the run) come at fixed steps; between them a call takes as many steps as `Pace` says. A checkpoint is
taken after a call, or after all that belongs to the boundary that the call came to. Written once for all strategies;
every worker runs it and meets the same boundaries.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.pipeline import dispose
from tfdist.data.sources import failures
from tfdist.errors import DivergedError, OutOfMemoryError, UserError, shorten_list
from tfdist.telemetry import heartbeat
from tfdist.telemetry.account import time_account
from tfdist.telemetry.console.console_text import EpochSummary, Progress
from tfdist.telemetry.facts import Point
from tfdist.telemetry.records import as_type
from tfdist.training.loop.best import find_best_metric
from tfdist.training.loop.boundaries import NUM_VOTES, Outcome, Pace, Vote, mean_losses
from tfdist.training.loop.callbacks import Callbacks
from tfdist.training.loop.evaluation import EvaluatorGroup, to_python
from tfdist.training.recovery.recovery import Checkpoint, RecoveryStart, version_error
from tfdist.training.run.assembly import Training, stream, xla_trial
from tfdist.training.step.layer_state import ReplicaStates
from tfdist.training.step.optimizer import learning_rate
from tfdist.training.step.step import TrainStep
from tfdist.training.watch.equality import Equality, compare_first_batch
from tfdist.training.watch.profiler import Profiler
from tfdist.training.watch.waiting import WaitTimes

SHOWN_VARIABLES = 5


@dataclasses.dataclass(frozen=True)
class _SavedState:
    """State of the loop in a checkpoint."""

    outcome: Outcome
    sums: Sequence[float]
    callbacks: Mapping[str, Any]
    boundary_is_due: bool
    stop: bool


class Loop:
    """Trains until a step, an early stop, or a divergence.

    Args:
      training: put together.
      opened: where it begins or resumes, and what saves it.
      step: runs K steps.
      evaluator: None trains without evaluation.
      callbacks: the user's.
      profiler: entered; may have calls end, and sees each.
    """

    def __init__(
        self,
        training: Training,
        opened: RecoveryStart,
        step: TrainStep,
        evaluator: EvaluatorGroup | None,
        callbacks: Callbacks,
        profiler: Profiler,
    ) -> None:
        strategy, settings, source = training.run.strategy, training.settings, training.source
        plan, events = training.plan, training.run.events
        self._strategy = strategy
        self._console, self._metrics, self._events = training.run.console, training.run.metrics, events
        self._examples_per_step = plan.num_examples_until(plan.steps_per_epoch) / plan.steps_per_epoch
        self._learner = training.learner
        self._rate_factor = training.rate_factor
        self._boundaries = training.boundaries
        self._recovery, self._start = opened.recovery, opened.start
        # A model that is given is not built anew where there is no checkpoint to go back to.
        self._saves_at_begin = settings.rollback is not None and training.run.request.repeats_end
        self._step = step
        self._xla_trial = xla_trial(training, step)
        self._iterator: Iterator[Any] | None = None
        self._open_iterator = functools.partial(stream, training.run, source, plan)
        self._evaluator = evaluator
        self._callbacks = callbacks
        self._pace = Pace(strategy, 1 if callbacks.act_on_batches else settings.steps_per_call)
        self._profiler = profiler
        compare = functools.partial(compare_first_batch, strategy, source, "training")
        self._equality = Equality(strategy, opened.state.replicated, events, compare)
        self._replica_states: ReplicaStates | None = ReplicaStates(training.learner.model, strategy)
        self._run = training.run
        self._watched = find_best_metric(settings)
        self._kept_best: Any = None  # of the checkpoints, as `Outcome.best` is the run's
        self._sums = [0.0] * (3 + len(step.term_names))  # as in `Totals`
        self._has_reported_unused = False
        self._has_called = False
        self._outcome = Outcome()
        self._wanted = Vote()
        self._stops_after_batch = False
        self._diverged: DivergedError | None = None
        self._gradient_norm: dict[str, float] = {}  # empty where it is not logged
        self._wait_times = WaitTimes(strategy, events, hint=source.input_hint)
        self._epoch_started, self._timed_from = time.perf_counter(), 0
        self._evaluation_seconds = 0.0

    def run(self) -> Outcome:
        """Trains; raises DivergedError when the loss or a gradient is not finite and nothing can skip it."""
        if self._recovery is not None:
            self._recovery.schedule.begin(time.monotonic())  # the time to the next checkpoint counts from now on
        self._callbacks.train_begin(None if self._start is None else self._next_epoch_end(self._start))
        if self._start is not None:
            self._start.restore()
            self._continue_from(self._start)
        if self._saves_at_begin and self._recovery is not None and (self._start is None or not self._start.values):
            self._save()
        else:
            self._equality.check(self._outcome.step)
        outcome, boundaries = self._outcome, self._boundaries
        while outcome.step < boundaries.last_step and not outcome.stopped_early:
            if outcome.step % boundaries.steps_per_epoch == 0:
                self._begin_epoch()
            boundary, at_boundary = boundaries.next_after(outcome.step), False
            while not at_boundary:
                self._call(self._next_stop(boundary))
                at_boundary = outcome.step == boundary or self._wanted.stop
                if self._wanted.leave:
                    self._leave(boundary_is_due=at_boundary)
                if self._wanted.save and not at_boundary:
                    self._save()
            cuts_epoch = outcome.step == boundaries.total_steps and outcome.step % boundaries.steps_per_epoch
            if cuts_epoch and self._recovery is not None and not self._wanted.stop:
                self._save(boundary_is_due=True)  # to a longer run nothing ends here
            self._finish_boundary()
        if self._recovery is not None and self._diverged is None and self._recovery.saved_step != outcome.step:
            self._save()  # what follows can be done again from here
        else:
            self._equality.check(self._outcome.step)
        self._wait_times.end(outcome.step)
        if outcome.step < boundaries.total_steps and not outcome.stopped_early:
            assert self._recovery is not None
            self._recovery.wait_until_stored(outcome.step, because="train.stop_after_epochs asks for it")
            return dataclasses.replace(outcome, paused=True)
        changed = self._strategy.any_worker(self._callbacks.train_end(self._logs()))
        if changed:
            outcome.evaluated_at = -1
            self._equality.check(self._outcome.step)
        if self._diverged is not None and not (changed and self._callbacks.weights_are_finite):
            self._diverged.is_by_callback = True
            raise self._diverged  # no callback has put back weights of before
        return outcome

    def _next_epoch_end(self, start: Checkpoint) -> int | None:
        """The epoch whose end callbacks see next, of a run that was begun before."""
        if not start.values or not start.step:
            return None
        return (start.step - bool(start.values.get("boundary_is_due"))) // self._boundaries.steps_per_epoch

    def _continue_from(self, start: Checkpoint) -> None:
        """Puts the loop where `_save` found it; the variables are there already."""
        self._outcome.step = self._timed_from = start.step
        if start.values:
            try:
                saved = as_type(_SavedState, dict(start.values))
            except ValueError as error:
                raise version_error(start.step, error) from error
            self._outcome = dataclasses.replace(saved.outcome, step=start.step)
            best, place = saved.outcome.best, (self._run.directory, self._boundaries)
            recall = functools.partial(self._watched.recall, best, *place, until=start.step - saved.boundary_is_due)
            bests = self._strategy.read_on_chief(recall, "What was best cannot be read")
            self._outcome.best, self._kept_best = bests
            if len(saved.sums) == len(self._sums):  # else the task has other terms now
                self._sums = [*saved.sums]
            stops = saved.stop or saved.outcome.stopped_early
            self._callbacks.restore(saved.callbacks, start.arrays, stops=stops)
            if saved.boundary_is_due:
                self._wanted = Vote(stop=saved.stop)
                self._finish_boundary()

    def _finish_boundary(self) -> None:
        """All that belongs to the step that was reached, and then a checkpoint if one is due."""
        outcome, boundaries = self._outcome, self._boundaries
        if self._evaluator is not None and boundaries.evaluates(outcome.step, stops=self._wanted.stop):
            self._evaluate()
            self._agree_on_stop()
        if boundaries.logs(outcome.step) and not self._wanted.stop:
            self._point("train", outcome.train_metrics | self._gradient_norm)
        is_best = self._is_best()
        if self._ends_epoch:
            self._end_epoch()
        if (is_best or self._wanted.save) and self._diverged is None:
            self._save()

    def _is_best(self) -> bool:
        """Notes the best so far; whether no checkpoint has one as good, and this is to be backed up."""
        outcome, kept = self._outcome, self._kept_best
        newest = functools.partial(self._watched.newest, logs=self._logs(), step=outcome.step, epoch=self._epoch + 1)
        outcome.best, self._kept_best = newest(outcome.best), newest(kept)
        return self._watched.policy is not None and self._recovery is not None and self._kept_best is not kept

    def _agree_on_stop(self) -> None:
        """Takes note where a callback of any worker has asked to stop. A collective, unless there are no callbacks."""
        if self._callbacks.are_any:
            heartbeat.beat(heartbeat.AGREEING)
            stop = self._wanted.stop or self._strategy.any_worker(self._callbacks.wants_stop)
            self._wanted = dataclasses.replace(self._wanted, stop=stop)
            heartbeat.beat(heartbeat.BETWEEN)

    @property
    def _ends_epoch(self) -> bool:
        """Whether an epoch ends here, if only because the training does."""
        outcome = self._outcome
        return self._wanted.stop or outcome.stopped_early or self._boundaries.ends_epoch(outcome.step)

    def _logs(self) -> dict[str, Any]:
        """The metrics of an epoch that ends here, and of an evaluation here, as callbacks get them."""
        outcome = self._outcome
        evaluated = outcome.eval_metrics if outcome.evaluated_at == outcome.step else {}
        trained = outcome.train_metrics if self._ends_epoch else {}
        return trained | {f"val_{name}": value for name, value in evaluated.items()}

    def _save(self, *, boundary_is_due: bool = False) -> None:
        outcome = self._outcome
        assert self._recovery is not None
        self._equality.check(self._outcome.step)
        callbacks, arrays = self._callbacks.changes()
        values = dataclasses.asdict(_SavedState(outcome, self._sums, callbacks, boundary_is_due, self._wanted.stop))
        numbers = {name: value for name, value in self._logs().items() if isinstance(value, (int, float))}
        self._recovery.save(outcome.step, values, arrays, numbers)
        self._wanted = Vote()

    def _leave(self, *, boundary_is_due: bool) -> NoReturn:
        if self._diverged is not None:
            raise self._diverged  # there is nothing to save
        assert self._recovery is not None
        self._save(boundary_is_due=boundary_is_due)
        self._recovery.leave(self._outcome.step)

    def _votes(self, step: int) -> Vote:
        wanted = Vote() if self._recovery is None else self._recovery.votes(step)
        return dataclasses.replace(wanted, stop=self._callbacks.wants_stop)

    @property
    def learning_rate(self) -> float:
        """The rate of the next update, after the failures so far."""
        return learning_rate(self._learner.optimizer) * self._rate_factor

    @property
    def _epoch(self) -> int:
        """The epoch that the last step done belongs to, counted from 0."""
        return max(0, self._outcome.step - 1) // self._boundaries.steps_per_epoch

    @property
    def _steps_in_epoch(self) -> int:
        return self._outcome.step - self._epoch * self._boundaries.steps_per_epoch

    def _begin_epoch(self) -> None:
        self._sums = [0.0] * len(self._sums)
        self._evaluation_seconds = 0.0
        self._step.reset_metrics()
        self._callbacks.call("on_epoch_begin", self._outcome.step // self._boundaries.steps_per_epoch)
        self._agree_on_stop()
        self._stops_after_batch = self._wanted.stop
        self._epoch_started, self._timed_from = time.perf_counter(), self._outcome.step

    def _next_stop(self, boundary: int) -> int:
        if self._stops_after_batch:
            return self._outcome.step + 1
        stops = [boundary, self._outcome.step + self._pace.steps_per_call]
        if self._recovery is not None:
            stops.append(self._recovery.schedule.next_boundary(self._outcome.step) or boundary)
        if (edge := self._profiler.next_edge(self._outcome.step)) is not None:
            stops.append(edge)
        return min(stops)

    def _call(self, last_step: int) -> None:
        """The steps up to `last_step` in one call of the compiled function, and what is told of them."""
        steps = last_step - self._outcome.step
        if self._callbacks.act_on_batches:
            self._callbacks.call("on_train_batch_begin", self._outcome.step % self._boundaries.steps_per_epoch)
        self._profiler.before_call(self._outcome.step)
        compiles = self._xla_trial is not None and self._xla_trial.compiles_next
        heartbeat.beat(heartbeat.BUILDING if compiles else heartbeat.TRAINING, self._outcome.step)
        iterator = self._find_iterator()
        started = time.perf_counter()
        votes = self._votes(last_step).tensor(self._wait_times.news())
        sums = np.array(self._sums)
        try:
            with failures.raise_recorded_errors(), self._profiler.trace_call(last_step, steps):
                span = np.array(self._outcome.step, np.int64), np.array(steps, np.int32)
                totals, metrics, answers = self._step.run(iterator, *span, votes, sums)
                done, overflowed = int(totals.steps), int(totals.overflowed)  # waits for the device
        except tf.errors.ResourceExhaustedError as error:
            told = out_of_memory(self._outcome.step, error)
            told.tries_xla = self._xla_trial is not None and self._xla_trial.has_tried
            raise told from error
        seconds = time.perf_counter() - started
        answers = answers.numpy().tolist()
        self._wanted = Vote.from_sums(answers)
        weightless_before, self._sums = self._sums[2], totals.sums.numpy().tolist()
        weightless = int(self._sums[2] - weightless_before)
        self._outcome.step += done
        if weightless and not self._outcome.weightless:
            self._events.warning(
                "weightless_step",
                step=self._outcome.step,
                message=f"Up to step {self._outcome.step} there was a batch whose examples weigh nothing in all "
                "(sample weights, class weights or a mask are 0). Such a step changes nothing; how many there were is "
                "said at the end.",
            )
        self._outcome.weightless += weightless
        heartbeat.beat(heartbeat.BETWEEN, self._outcome.step)
        waits = {"input_seconds": float(totals.input_seconds), "peer_seconds": float(totals.peer_seconds)}
        self._account(seconds, **waits)
        self._profiler.after_call(self._outcome.step)
        losses = mean_losses(self._sums, self._step.term_names) if self._step.reports_loss else {}
        self._outcome.train_metrics = losses | to_python(metrics)
        if self._step.unused and not self._has_reported_unused:
            self._has_reported_unused = True
            self._report_unused(self._step.unused)
        gradient_norm = float(totals.gradient_norm)
        if not math.isnan(gradient_norm):
            self._gradient_norm = {"gradient_norm": gradient_norm}
        self._pace.observe(steps, seconds)
        if self._xla_trial is not None and done == steps:
            self._step = self._xla_trial.observe(self._outcome.step, steps, seconds)
            if self._xla_trial.is_over:
                self._xla_trial = None  # lets what was not chosen go
        news = answers[NUM_VOTES:]
        self._wait_times.observe(step=self._outcome.step, steps=done, seconds=seconds, news=news, **waits)
        self._end_batch(done, overflowed)
        self._console.update(
            Progress(
                step=self._outcome.step,
                epoch=self._epoch + 1,
                step_in_epoch=self._steps_in_epoch,
                metrics=self._outcome.train_metrics,
                examples_per_second=done / seconds * self._examples_per_step,
            )
        )
        if self._recovery is not None:
            self._recovery.check()

    def _find_iterator(self) -> Iterator[Any] | None:
        """The local batches from the next step on; None for a step that reads its rows without them."""
        if not self._step.reads_iterator:
            self.close()  # it would stay behind
        elif self._iterator is None:
            self._iterator = self._open_iterator(first_step=self._outcome.step)
        return self._iterator

    def close(self) -> None:
        """Lets the input go, which the model's evaluation and export do not need."""
        if self._iterator is not None:
            dispose(self._iterator)
        self._iterator = None

    def _report_unused(self, variables: Sequence[str]) -> None:
        shown = ", ".join(shorten_list(variables, SHOWN_VARIABLES))
        self._events.warning(
            "variables_unused",
            step=self._outcome.step,
            message=f"The loss does not depend on {len(variables)} trainable variables; they stay as they are: {shown}",
            variables=variables,
        )

    def _account(self, seconds: float, input_seconds: float, peer_seconds: float) -> None:
        """Divides the time of a call; the first one traces and compiles."""
        account = time_account.current()
        if self._has_called:
            account.move(input_seconds, "compute", "input_wait")
            account.move(peer_seconds, "compute", "peer_wait")
        else:
            account.move(seconds, "compute", "build")
        self._has_called = True

    def _end_batch(self, done: int, overflowed: int) -> None:
        """Calls the batch hooks; raises DivergedError at a loss that is not finite, if none of them stops there."""
        outcome = self._outcome
        self._diverged = self._judge(done, overflowed)
        if self._diverged is not None:
            self._diverged.step = outcome.step
            outcome.train_metrics["loss"] = math.nan
        raised: UserError | None = None
        try:
            if self._callbacks.act_on_batches or self._diverged is not None:
                self._callbacks.call("on_train_batch_end", self._steps_in_epoch - 1, outcome.train_metrics)
        except UserError as error:
            if self._diverged is None:
                raise
            raised = error  # as TerminateOnNaN(raise_error=True) does
        if self._diverged is not None and self._strategy.any_worker(raised is not None):
            self._diverged.is_by_callback = True
            raise self._diverged from raised
        if self._callbacks.act_on_batches or self._diverged is not None:
            self._agree_on_stop()
        if self._diverged is not None and not self._wanted.stop:
            raise self._diverged

    def _judge(self, done: int, overflowed: int) -> DivergedError | None:
        """The error that a call of `done` steps, of which some were not finite, ends the run with; None to continue.

        With a loss scale such steps were skipped, which is told, and the scale is lower now.
        """
        step, loss_scale = self._outcome.step, self._learner.loss_scale
        if not overflowed:
            return None
        if loss_scale is None:
            return DivergedError(
                f"Training diverged at step {step}: the loss or a gradient is not finite. Try a lower "
                "learning rate, an optimizer with global_clipnorm=1.0 or train.precision = 'float32', and look for "
                "examples that are not finite."
            )
        scale = float(keras.ops.convert_to_numpy(loss_scale.scale))
        if overflowed == done and scale <= 1.0:
            return DivergedError(
                f"Training diverged at step {step}: gradients overflow float16 even at loss scale 1. Try "
                "train.precision = 'bfloat16' or 'float32', or a lower learning rate."
            )
        self._events.warning("gradient_overflow", step=step, steps=overflowed, loss_scale=scale)
        return None

    def _evaluate(self) -> None:
        assert self._evaluator is not None
        started = time.perf_counter()
        self._callbacks.allow_evaluation()
        self._callbacks.call("on_test_begin")
        hooks = self._callbacks if self._callbacks.act_on_test_batches else None
        ends_early = not self._callbacks.wrap_tests  # else a checkpoint would hold what they prepared for it
        results = self._evaluator.evaluate((lambda: self._votes(self._outcome.step)) if ends_early else Vote, hooks)
        if results is None:
            self._leave(boundary_is_due=True)
        self._outcome.eval_metrics, self._outcome.evaluated_at = results, self._outcome.step
        self._callbacks.call("on_test_end", results)
        self._point("eval", results)
        self._evaluation_seconds += time.perf_counter() - started

    def _end_epoch(self) -> None:
        outcome = self._outcome
        seconds = time.perf_counter() - self._epoch_started
        steps = outcome.step - self._timed_from  # of this process, which may have begun within the epoch
        self._point("train", outcome.train_metrics | self._gradient_norm)
        rate = steps / max(1e-9, seconds - self._evaluation_seconds)
        self._console.end_epoch(
            EpochSummary(
                step=outcome.step,
                epoch=self._epoch + 1,
                metrics=outcome.train_metrics,
                eval_metrics=outcome.eval_metrics if outcome.evaluated_at == outcome.step else {},
                seconds=seconds,
                examples_per_second=rate * self._examples_per_step if steps else None,
            )
        )
        heartbeat.beat(heartbeat.AGREEING)
        self._wait_times.end_epoch(step=outcome.step, epoch=self._epoch)
        self._compare_replicas()
        heartbeat.beat(heartbeat.BETWEEN)
        self._callbacks.call("on_epoch_end", self._epoch, self._logs())
        heartbeat.beat(heartbeat.AGREEING)
        outcome.stopped_early = self._strategy.any_worker(self._wanted.stop or self._callbacks.wants_stop)
        heartbeat.beat(heartbeat.BETWEEN)

    def _compare_replicas(self) -> None:
        """Notes once that layers have written other values on each replica. A collective."""
        if self._replica_states is not None and (names := self._replica_states.find_differing()):
            self._replica_states = None
            self._run.note(
                "replica_state_differs",
                f"Replicas have other values of {', '.join(names)}, which a layer writes. The first one's is saved; "
                "one device would have another. Write add_weight(…, aggregation='sum'), or 'mean', or "
                "'only_first_replica'.",
            )

    def _point(self, split: str, metrics: dict[str, Any]) -> None:
        step, epoch, rate = self._outcome.step, self._epoch + 1, self.learning_rate
        self._metrics.log(Point(step=step, epoch=epoch, split=split, metrics=dict(metrics), learning_rate=rate))


def out_of_memory(step: int, error: tf.errors.ResourceExhaustedError) -> OutOfMemoryError:
    """Builds the error for a call that found no memory; `step` steps were done before it."""
    lines = [line for line in str(error.message).splitlines() if "OOM when" in line or "out of memory" in line.lower()]
    wanted = f" ({lines[0].strip()[:160]})" if lines else ""
    told = OutOfMemoryError(
        f"A training step after step {step:,} found no memory{wanted}. Write train.num_microbatches = 2, or more; "
        "or a smaller train.global_batch_size."
    )
    told.step = step
    return told
