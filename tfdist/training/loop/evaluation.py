"""Passes without updates: evaluation, each example once, on however many replicas; and batch statistics taken anew."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batches import BatchPlan, select_rows
from tfdist.data.pipeline import dispose
from tfdist.data.sources.source import Source
from tfdist.keras_patches.patches import Patches
from tfdist.keras_patches.random_by_place import draw_for_rows
from tfdist.strategies.strategy import Strategy, replica_index
from tfdist.tasks.task import ROWS, Objective, OwnSteps, Task, round_shares
from tfdist.telemetry import heartbeat
from tfdist.training.loop.boundaries import Pace, Vote, Votes
from tfdist.training.loop.callbacks import Callbacks
from tfdist.training.run.eval_sets import prefix_results
from tfdist.training.run.run import Run
from tfdist.training.step.gradients import forward, quotients
from tfdist.training.step.metrics import MetricGroup
from tfdist.training.step.normalization import batch_norm_layers
from tfdist.training.step.own_step import (
    StepMetrics,
    average_over_replicas,
    find_whole_rows,
    step_on_rows,
    trace_step,
)
from tfdist.training.step.precision import as_tf_function
from tfdist.training.step.randomness import find_rows


class Evaluator:
    """Evaluates a model on one split, again and again.

    Args:
      run: open; told once if the split weighs nothing in all.
      model: built inside the strategy's scope.
      task: gives loss and metrics.
      metrics: of this split, made inside the scope.
      iterator: an endless stream of local batches in a fixed order.
      plan: of the batches; an epoch of it is the split.
    """

    def __init__(
        self, run: Run, model: keras.Model, task: Task, metrics: MetricGroup, iterator: Iterator[Any], plan: BatchPlan
    ) -> None:
        strategy = run.strategy
        self._strategy = strategy
        self._model = model
        self._task = task
        self._metrics = metrics
        self._term_names: Sequence[str] = task.term_names()
        self._iterator: Any = iterator
        self._plan = plan
        self._num_steps = plan.steps_per_epoch
        self._note = run.note
        self._has_noted = False
        with strategy.scope():
            # [Σ weight, Σ loss · examples, Σ examples, Σ term · examples …] over the batches so far, of this replica.
            sums = keras.metrics.Metric(name="loss_sums")
            self._sums = sums.add_variable(shape=(3 + len(self._term_names),), initializer="zeros", name="sums")
        self._pace = Pace(strategy, None)
        self._begin = as_tf_function(lambda: strategy.run(self._reset))
        self._advance = as_tf_function(self._steps, reduce_retracing=True)
        self._end = as_tf_function(lambda: strategy.first_local(strategy.run(self._results)))

    def evaluate(self, votes: Votes = Vote, hooks: Callbacks | None = None) -> dict[str, Any] | None:
        """One pass over the split; every worker calls it.

        Args:
          votes: asked before each call of some steps; where any worker wants to leave, the pass ends.
          hooks: called before and after every batch, with the results over those so far; calls are then one step long.

        Returns:
          The loss and every metric over all examples of the split, without the loss where these weigh nothing in all.
          None for a pass that ended early, after which the iterator stands in its middle.
        """
        heartbeat.beat(heartbeat.EVALUATING)
        self._begin()
        step = 0
        while step < self._num_steps:
            count = 1 if hooks else min(self._pace.steps_per_call, self._num_steps - step)
            if hooks:
                hooks.call("on_test_batch_begin", step)
            wanted = self._call(count, votes())
            if hooks:
                hooks.call("on_test_batch_end", step, self._read())
            step += count
            if step < self._num_steps and wanted.leave:
                return None
            if hooks and self._strategy.any_worker(hooks.wants_evaluation_stop):
                results = self._read()
                self._call(self._num_steps - step, Vote())  # on to where the next pass begins
                break
            heartbeat.beat(heartbeat.EVALUATING)
        else:
            results = self._read()
        heartbeat.beat(heartbeat.BETWEEN)
        if "loss" not in results and not self._has_noted:
            self._has_noted = True
            self._note("weightless_evaluation", "The examples of the evaluation weigh nothing in all: it has no loss.")
        return results

    def _read(self) -> dict[str, Any]:
        """The results over the batches so far; without losses while nothing has weighed anything."""
        weight, losses, metrics = self._end()
        return (to_python(losses) if float(weight) else {}) | to_python(metrics)

    def _call(self, count: int, votes: Vote) -> Vote:
        """The next `count` steps; what any worker wants."""
        started = time.perf_counter()
        wanted = self._advance(self._iterator, np.array(count, np.int32), votes.tensor()).numpy()
        self._pace.observe(count, time.perf_counter() - started)
        return Vote.from_sums(wanted)

    def close(self) -> None:
        """Lets the stream go, without waiting for it. Nothing can be evaluated afterwards."""
        iterator, self._iterator = self._iterator, None
        dispose(iterator)

    def next_batch(self) -> Any:
        """The next local batches, for what looks at an evaluation without one."""
        return next(self._iterator)

    def on_batch(self, batch: Any) -> None:
        """Adds up one step's local batches. In cross-replica context."""
        self._strategy.run(self._on_replica, args=(batch,))

    def _steps(self, iterator: Iterator[Any], num_steps: tf.Tensor, votes: tf.Tensor) -> tf.Tensor:
        def step(index: tf.Tensor) -> tuple[tf.Tensor]:
            self.on_batch(next(iterator))
            return (index + 1,)

        tf.while_loop(lambda i: i < num_steps, step, [tf.constant(0)], parallel_iterations=1)
        summed = self._strategy.run(lambda own: self._strategy.sum_over_replicas([own])[0], args=(votes,))
        return self._strategy.first_local(summed)

    def _reset(self) -> None:
        self._metrics.reset()
        self._sums.assign(tf.zeros_like(self._sums))

    def _on_replica(self, batch: dict[str, Any]) -> None:
        parts = {"num_parts": self._strategy.topology.num_replicas, "batch_size": self._plan.global_batch_size}
        first_row = self._plan.find_first_row(batch, 0, replica_index())
        with draw_for_rows(find_rows(self._plan, batch["examples"], first_row)):
            objective = forward(self._model, self._task, batch, training=False, **parts)
        shares = round_shares(batch["shares"]) if "shares" in batch else None
        self._task.update_metrics(self._metrics.metrics, batch["examples"], objective.outputs, shares)
        loss, terms = self._parts_of_losses(objective)
        count = objective.divisors[ROWS]
        (weight,) = objective.weight or (count,)
        self._sums.assign_add(tf.stack([weight, loss, count, *(terms[n] for n in self._term_names)]))

    def _parts_of_losses(self, objective: Objective) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """This replica's parts of the loss of the global batch, and of each term's, times the batch's examples.

        Means over examples are the sums themselves. Others are divided by what adds up over the replicas, for which
        these first have to meet.
        """
        others = [by for by in objective.divisors if by != ROWS]
        if others:
            summed = self._strategy.sum_over_replicas([objective.divisors[by] for by in (ROWS, *others)])
            divisors = dict(zip((ROWS, *others), summed, strict=True))
            loss, terms = quotients(objective._replace(divisors=divisors))
            return loss * divisors[ROWS], {name: value * divisors[ROWS] for name, value in terms.items()}
        return objective.shown[ROWS], objective.term_sums[ROWS]

    def _results(self) -> tuple[tf.Tensor, dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Returns the total weight of all examples, the losses, and the metrics. A collective."""
        (sums,) = self._strategy.sum_over_replicas([tf.convert_to_tensor(self._sums.value)])
        weight, loss_sum, count, *terms = tf.unstack(sums)
        losses = {"loss": tf.math.divide_no_nan(loss_sum, count)}
        for name, term in zip(self._term_names, terms, strict=True):
            losses[f"{name}_loss"] = tf.math.divide_no_nan(term, count)
        return weight, losses, self._metrics.read(self._strategy)[0]


class EvaluatorGroup:
    """Evaluates a model on one set or several, one after the other.

    Args:
      evaluators: by the names of their sets, of which the first one's results have plain names.
    """

    def __init__(self, evaluators: Mapping[str, Evaluator]) -> None:
        self._evaluators = evaluators
        first = next(iter(evaluators.values()))
        self.on_batch, self.next_batch = first.on_batch, first.next_batch

    def evaluate(self, votes: Votes = Vote, hooks: Callbacks | None = None) -> dict[str, Any] | None:
        """One pass over each set, as `Evaluator.evaluate`; None where one ended early."""
        results: dict[str, dict[str, Any]] = {}
        for name, evaluator in self._evaluators.items():
            if results and hooks:
                hooks.allow_evaluation()
            found = evaluator.evaluate(votes, hooks)
            if found is None:
                return None
            results[name] = found
        return prefix_results(results)

    def close(self) -> None:
        """Lets the streams go, without waiting for them. Nothing can be evaluated afterwards."""
        for evaluator in self._evaluators.values():
            evaluator.close()


class OwnEvaluator(Evaluator):
    """Evaluates a model by its `test_step`, whose metrics may be those of a training that goes on afterwards.

    Args:
      run: open.
      model: built inside the strategy's scope.
      source: of the split.
      iterator, plan: as `Evaluator` has them.
      patches: of the model's use.

    Raises:
      UserError: the examples do not fit the model's step.
    """

    def __init__(
        self, run: Run, model: keras.Model, source: Source, iterator: Iterator[Any], plan: BatchPlan, patches: Patches
    ) -> None:
        strategy = run.strategy
        with strategy.scope():
            metrics = StepMetrics(model, trace_step(model, "test_step", source.structure))
        average_over_replicas(model, (), metrics.metrics, patches)
        super().__init__(run, model, OwnSteps(), metrics, iterator, plan)
        self._step_metrics = metrics
        self._whole_rows = find_whole_rows(plan, source)
        self._has_noted = True  # where there is no loss, the step returns none
        self._read_states = as_tf_function(lambda: strategy.first_local(strategy.run(metrics.states, args=(strategy,))))
        self._load_states = as_tf_function(lambda states: strategy.run(metrics.load, args=(strategy, states)))

    def evaluate(self, votes: Votes = Vote, hooks: Callbacks | None = None) -> dict[str, Any] | None:
        states = self._read_states()
        results = super().evaluate(votes, hooks)
        self._load_states(states)
        return results

    def _on_replica(self, batch: dict[str, Any]) -> None:
        step_on_rows(self._strategy, self._model, "test_step", self._step_metrics, batch, self._plan, self._whole_rows)

    def _results(self) -> tuple[tf.Tensor, dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        return tf.constant(0.0), {}, self._metrics.read(self._strategy)[0]


def to_python(results: dict[str, tf.Tensor]) -> dict[str, Any]:
    """Scalars as floats, vectors as lists."""
    return {name: value.numpy().tolist() for name, value in results.items()}


def renew_batch_statistics(
    strategy: Strategy, model: keras.Model, task: Task, iterator: Iterator[Any], *, steps: int, batch_size: int
) -> None:
    """Takes batch statistics of weights that no training step has seen: averages. Every worker calls it.

    The weights stay; the moving statistics become the plain means over the batches, whatever they were before.

    Args:
      strategy: connected.
      model: with the weights to take them of.
      task: calls the model.
      iterator: local batches.
      steps: how many of them.
      batch_size: the most examples of a global batch.
    """

    def on_replica(batch: dict[str, Any]) -> None:
        sizes = {"num_parts": strategy.topology.num_replicas, "batch_size": batch_size}
        forward(model, task, select_rows(batch), training=True, **sizes)

    def step(iterator: Iterator[Any], of_step: tf.Tensor) -> None:
        with Patches() as patches:
            for layer in layers:
                patches.replace(layer, momentum=of_step)
            strategy.run(on_replica, args=(next(iterator),))

    layers = [layer for layer in batch_norm_layers(model) if layer.trainable]
    take = as_tf_function(step)
    for index in range(steps):
        heartbeat.beat(heartbeat.EVALUATING)
        take(iterator, tf.constant(index / (index + 1), tf.float32))
    heartbeat.beat(heartbeat.BETWEEN)
