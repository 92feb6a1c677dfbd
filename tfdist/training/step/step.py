"""The training step, and K of them in one call.

A step is: each replica's sums over its examples → one reduction over all replicas → division by what the loss divides
by, over the global batch → finite check → clipping and update by the Keras optimizer. Invariant: after the reduction
every replica holds the same bits, so all of them decide and update alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.strategies.strategy import Strategy, sum_repeated_rows
from tfdist.strategies.sums import ordered_sum, sum_in_16_bits
from tfdist.tasks.task import ROWS
from tfdist.training.sharding.sharded_update import ShardedUpdate
from tfdist.training.step.gradients import MEAN, NEXT_VALUES, LocalGradients, add_gradients, colocate_with, quotients
from tfdist.training.step.layer_state import moving_variables
from tfdist.training.step.optimizer import Update
from tfdist.training.step.precision import as_tf_function, factor_of
from tfdist.training.step.state import Learner
from tfdist.training.watch.waiting import read_clock, time_input


class Totals(NamedTuple):
    """The sums over an epoch's steps, and over those of one call; the same on every replica, seconds apart.

    Attributes:
      sums: float64 [3 + terms], of the epoch so far: of the steps that were applied Σ of the global batch's loss times
        its examples, and Σ of these examples; how many steps had examples that weigh nothing in all, and changed
        nothing; then of each loss term what the first is of all. The first ÷ the second is the loss to report, as
        Keras's `fit` averages it.
      steps: steps done in this call, skipped ones included.
      overflowed: steps whose loss or gradients were not finite.
      gradient_norm: float32, of the last step's gradients, before clipping; NaN where it is not logged.
      input_seconds: float64, this worker's own: how long it waited for batches.
      peer_seconds: float64, this worker's own: how long it waited for the sums over all workers.
    """

    sums: tf.Tensor
    steps: tf.Tensor
    overflowed: tf.Tensor
    gradient_norm: tf.Tensor
    input_seconds: tf.Tensor
    peer_seconds: tf.Tensor


class StepResult(NamedTuple):
    """The result of one step over all replicas.

    Attributes:
      loss: the global batch's.
      terms: the loss of each term that is reported.
      count: its examples.
      weight: what they weigh; empty where each counts, whatever the batch.
      finite: whether all of this, and the gradients, are.
      peer_seconds: float64, how long this worker waited until it was there.
      gradient_norm: float32, of all gradients; NaN where it is not logged.
    """

    loss: tf.Tensor
    terms: dict[str, tf.Tensor]
    count: tf.Tensor
    weight: tuple[tf.Tensor, ...]
    finite: tf.Tensor
    peer_seconds: tf.Tensor
    gradient_norm: tf.Tensor


class TrainStep:
    """Runs training steps under a strategy.

    With a loss scale, a step that overflows is skipped and training continues. Without it nothing waits for the check,
    unless `deterministic`: updates run beside the backward pass, and the first step whose loss or gradients are not
    finite ends the call after its update, which leaves the weights unusable.

    Args:
      strategy: connected.
      learner: what is trained.
      local: one replica's forward and backward pass.
      log_gradient_norm: computes the norm of each step's gradients.
      rate_factor: of the learning rate that the optimizer has.
      compiles_update: has XLA compile the update where it can, which is not with shards.
      swa_start: as `Update` takes it.
      deterministic: keeps the update apart from the pass before it. Together TensorFlow's graph optimizer regroups
        their arithmetic, by another way under each strategy, and the last bits would differ.
      reduce_precision: sums gradients over several replicas as `sum_in_16_bits` does; None: in their own type.

    Attributes:
      term_names: the loss terms to report beside the total.
      unused: trainable variables that the loss does not depend on, known after the first call.
      on_batch: one step on local batches, and what it came to. In cross-replica context.
      reports_loss: whether the loss is reported, beside the metrics.
      reads_iterator: whether a call takes its batches from the iterator, which stands at the call's first step then.
    """

    reports_loss = True
    reads_iterator = True

    def __init__(
        self,
        strategy: Strategy,
        learner: Learner,
        local: LocalGradients,
        *,
        log_gradient_norm: bool = False,
        rate_factor: float = 1.0,
        compiles_update: bool = False,
        swa_start: int | None = None,
        deterministic: bool = False,
        reduce_precision: str | None = None,
    ) -> None:
        shards, loss_scale = learner.shards, learner.loss_scale
        self._strategy = strategy
        self._learner = learner
        self._reduce_precision = reduce_precision if strategy.topology.num_replicas > 1 else None
        self.compiles_update = compiles_update and shards is None
        options: dict[str, Any] = {"loss_scale": loss_scale, "rate_factor": rate_factor, "swa_start": swa_start}
        self.update = (
            Update(strategy, learner.optimizer, jit_compile=compiles_update, **options)
            if shards is None
            else ShardedUpdate(strategy, learner.optimizer, shards, **options)
        )
        self._scatters = shards if shards is not None and shards.scatters else None
        self.local = local
        self.term_names = local.term_names
        self._log_gradient_norm = log_gradient_norm
        self._waits = deterministic or loss_scale is not None
        # What a skipped step must not change; without a loss scale the run ends with it.
        self._moving = (
            [] if loss_scale is None else [*moving_variables(learner.model), *learner.train_metrics.variables]
        )
        self._learning: list[Any] = []
        self.unused: list[str] = []
        self.on_batch: Callable[[Any], StepResult] = self._on_batch
        if strategy.is_one_program and loss_scale is None:
            self.on_batch = lambda batch: strategy.first_local(strategy.run(self._on_batch, args=(batch,)))
        # Keras's fit traces without autograph too, so a model behaves alike under both.
        self.run = as_tf_function(self._run, reduce_retracing=True)
        self.reset_metrics = as_tf_function(lambda: strategy.run(learner.train_metrics.reset))

    def _run(
        self, iterator: Iterator[Any], first_step: tf.Tensor, num_steps: tf.Tensor, votes: tf.Tensor, sums: tf.Tensor
    ) -> tuple[Totals, dict[str, tf.Tensor], tf.Tensor]:
        """Some steps.

        Args:
          iterator: local batches.
          first_step: int64 scalar, how many steps of the run are done.
          num_steps: int32 scalar.
          votes: float32 vector, this worker's; and whatever else the workers should tell each other.
          sums: as in `Totals`, what the epoch's earlier calls came to. Every step is added to them one by one, so that
            no bit of the mean depends on where calls end.

        Returns:
          The totals, the training metrics so far, and the sum of all replicas' votes.
        """

        def read(votes: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            metrics, (votes,) = self._learner.train_metrics.read(self._strategy, [votes])
            return metrics, votes

        sums = tf.ensure_shape(sums, [3 + len(self.term_names)])
        none, seconds = tf.constant(0), tf.constant(0.0, tf.float64)
        begin = Totals(sums, none, none, tf.constant(math.nan), seconds, seconds)
        proceeds = functools.partial(self._proceeds, until=num_steps)
        repeated, ahead = self._build_step(iterator, first_step, num_steps)
        totals, *_ = tf.while_loop(proceeds, repeated, [begin, *ahead], parallel_iterations=1)
        metrics, votes = self._strategy.first_local(self._strategy.run(read, args=(votes,)))
        return totals, metrics, votes

    def _proceeds(self, totals: Totals, *ahead: Any, until: tf.Tensor) -> tf.Tensor:
        """Whether a loop goes on: fewer steps than `until` are done, and each was finite or could be skipped."""
        going = totals.steps < until
        return going if self._learner.loss_scale is not None else going & tf.equal(totals.overflowed, 0)

    def _build_step(self, iterator: Iterator[Any], first_step: tf.Tensor, num_steps: tf.Tensor) -> tuple[Any, Any]:
        """Returns what the loop of a call repeats, and what it is given at first beside the totals."""

        def step(totals: Totals) -> tuple[Totals]:
            batch, waited = time_input(self._strategy, lambda: next(iterator))
            return (advance_totals(totals, self.on_batch(batch), waited),)

        return step, []

    def _on_batch(self, batch: Any) -> StepResult:
        """One update that waits for nothing but its gradients; or one that waits until they are known to be finite.

        If they are not, no replica updates. If nothing weighs anything, neither: momentum, weight decay and iterations
        would move alone.
        """
        strategy, loss_scale = self._strategy, self._learner.loss_scale
        moving = strategy.run(lambda: [tf.identity(each.value) for each in self._moving]) if self._waits else []
        gradients, next_values, result = strategy.run(self._reduced_gradients, args=(batch,))
        result = strategy.first_local(result)
        if self._log_gradient_norm:
            result = result._replace(gradient_norm=_norm([strategy.first_local(each) for each in gradients]))

        update = functools.partial(self.update, gradients, self._learning)
        if next_values:
            update = functools.partial(self._overwrite, next_values, update)
        if result.weight:
            update = functools.partial(tf.cond, _weighs_nothing(result.weight), lambda: tf.constant(False), update)

        def skip() -> tf.Tensor:
            """Restores batch statistics of before the forward pass, or they stay infinite; lowers the loss scale."""
            for variable, value in zip(self._moving, moving, strict=True):
                strategy.distribution.extended.update(variable.value, lambda v, new: v.assign(new), args=(value,))
            if loss_scale is not None:
                strategy.run(loss_scale.update, args=(tf.constant(False),))
            return result.finite

        if self._waits:
            tf.cond(result.finite, update, skip)
        else:
            update()
        return result

    def _reduced_gradients(self, batch: dict[str, Any]) -> tuple[list[Any], list[tf.Tensor], StepResult]:
        """One step up to the update; in replica context, on a local batch."""
        variables = self.local.variables
        nodes = self.local(batch)
        next_of_nodes = zip(*(gradients.pop(NEXT_VALUES) for gradients, _ in nodes), strict=True)
        next_values = self._take_largest([functools.reduce(tf.maximum, some) for some in next_of_nodes])
        sums = nodes[0][1]
        own = [(name, i) for name, some in nodes[0][0].items() for i, g in enumerate(some) if g is not None]
        used = {i for _, i in own}
        self._learning = [v for i, v in enumerate(variables) if i in used]
        self.unused = [v.path for i, v in enumerate(variables) if i not in used]
        local = [([gradients[name][i] for name, i in own], tf.nest.flatten(rest)) for gradients, rest in nodes]
        began = read_clock(self._strategy, [tensor for pair in local for some in pair for tensor in some])
        summed, scalars, total = self._sum_gradients(local, [variables[i] for _, i in own])
        peer_seconds = read_clock(self._strategy, [*summed, *scalars]) - began
        if not self.update.takes_repeats:
            summed = [sum_repeated_rows(gradient) for gradient in summed]
        sums = tf.nest.pack_sequence_as(sums, scalars)
        found: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        for (name, i), gradient in zip(own, summed, strict=True):
            if name != MEAN:
                gradient = multiply_gradient(gradient, self._factor(sums.divisors[name]))
            found[i] = sum_repeated_rows(add_gradients(found[i], gradient)) if i in found else gradient
        gradients = [found[i] for i in sorted(found)]
        loss, terms = quotients(sums)
        terms = {name: terms[name] for name in self.term_names if name in terms}
        finite = are_finite(gradients if total is None else [total], loss)
        norm = tf.constant(math.nan)
        result = StepResult(loss, terms, sums.divisors[ROWS], sums.weight, finite, peer_seconds, norm)
        return gradients, next_values, result

    def _take_largest(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Next values of variables with the largest first number of all replicas, which differ in nothing else."""
        if not values:
            return []
        flat = [tf.reshape(value, [-1]) for value in values]
        rows = self._strategy.all_gather(tf.concat([each[:1] for each in flat], axis=0), name="next")
        first = tf.split(tf.reduce_max(rows, axis=0), len(flat))
        whole = [tf.concat([one, each[1:]], axis=0) for one, each in zip(first, flat, strict=True)]
        return [tf.reshape(each, value.shape) for each, value in zip(whole, values, strict=True)]

    def _overwrite(self, next_values: list[Any], update: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Gives variables their next values, beside the update of all others."""

        def on_replica(values: list[tf.Tensor]) -> None:
            for variable, value in zip(self.local.overwritten, values, strict=True):
                variable.value.assign(value)

        self._strategy.run(on_replica, args=(next_values,))
        return update()

    def _sum_gradients(
        self, local: Sequence[tuple[list[Any], list[tf.Tensor]]], variables: list[keras.Variable]
    ) -> tuple[list[Any], list[tf.Tensor], tf.Tensor | None]:
        """The sums of gradients and scalars over the replicas, and of all gradients' elements where none has all.

        Args:
          local: this replica's gradients and scalars; with parts that are added in one order, those of each node.
          variables: that the gradients are taken by.
        """
        gradients, scalars = local[0]
        if self.local.plan.num_parts is not None:
            nodes = [[*_match_shapes(some, variables, rows=False), *rest] for some, rest in local]
            tensors = ordered_sum(self._strategy, nodes, self.local.plan.spans)
            return tensors[: len(gradients)], tensors[len(gradients) :], None
        if self._reduce_precision is not None:
            sent = _match_shapes(gradients, variables, rows=self._strategy.gathers_rows)
            return *sum_in_16_bits(self._strategy, sent, scalars, self._reduce_precision), None
        if self._scatters is None:
            return *self._strategy.sum_gradients(gradients, scalars), None
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        total = tf.add_n([tf.cast(tf.reduce_sum(gradient), tf.float32) for gradient in dense])
        left = [i for i, variable in enumerate(variables) if not self._scatters.is_sharded(variable)]
        sent, whose = [dense[i] for i in left], [variables[i] for i in left]
        found, received = self._scatters.reduce_to_owners(sent, whose, name="step")
        reduced = dict(zip(left, found, strict=True))
        summed = [reduced.get(i, gradient) for i, gradient in enumerate(dense)]
        *scalars, total = self._strategy.sum_over_replicas([*scalars, total])
        return summed, scalars, total + tf.add_n([_opaque_zero(each) for each in received])

    def _factor(self, divisor: tf.Tensor) -> tf.Tensor:
        """The factor of a sum of gradients. Where nothing counts it is 0: no update instead of NaN."""
        return tf.math.reciprocal_no_nan(divisor) / factor_of(self._learner.loss_scale, self._learner.scale_factor)


def advance_totals(totals: Totals, seen: StepResult, waited: tf.Tensor) -> Totals:
    """The totals after one more step; a skipped step's loss, which may be infinite or of nothing, is left out."""
    weightless = seen.finite & _weighs_nothing(seen.weight)

    def count_finite(value: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.where(seen.finite & ~weightless, value, tf.zeros_like(value)), tf.float64)

    count = count_finite(seen.count)
    terms = [count_finite(term) * count for term in seen.terms.values()]
    return Totals(
        totals.sums + tf.stack([count_finite(seen.loss) * count, count, tf.cast(weightless, tf.float64), *terms]),
        totals.steps + 1,
        totals.overflowed + tf.cast(~seen.finite, tf.int32),
        seen.gradient_norm,
        totals.input_seconds + waited,
        totals.peer_seconds + seen.peer_seconds,
    )


def _match_shapes(gradients: Sequence[Any], variables: Sequence[keras.Variable], *, rows: bool) -> list[Any]:
    """The gradients in their variables' shapes, which TensorFlow may not know; `rows`: `tf.IndexedSlices` stay."""
    return [
        g if rows and isinstance(g, tf.IndexedSlices) else tf.ensure_shape(tf.convert_to_tensor(g), v.shape)
        for g, v in zip(gradients, variables, strict=True)
    ]


def _opaque_zero(needed: tf.Tensor) -> tf.Tensor:
    """0, by a computation that TensorFlow does not see through, nor leave out what it is made of."""
    bit = tf.cast(needed[0], tf.bool)
    return tf.where(tf.equal(bit, bit), 0.0, float("nan"))


def _weighs_nothing(weight: tuple[tf.Tensor, ...]) -> tf.Tensor:
    return tf.equal(weight[0], 0.0) if weight else tf.constant(False)


def multiply_gradient(gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """The gradient times a scalar, in the gradient's type."""
    if not isinstance(gradient, tf.IndexedSlices):
        with colocate_with(gradient):
            return gradient * tf.cast(factor, gradient.dtype)
    return tf.IndexedSlices(gradient.values * tf.cast(factor, gradient.dtype), gradient.indices, gradient.dense_shape)


def _norm(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """The norm of all gradients' numbers, those of a row once."""
    whole = [sum_repeated_rows(each) for each in gradients]
    values = [tf.cast(g.values if isinstance(g, tf.IndexedSlices) else g, tf.float32) for g in whole]
    return tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(each)) for each in values]))


def are_finite(gradients: Sequence[tf.Tensor | tf.IndexedSlices], loss: tf.Tensor) -> tf.Tensor:
    """Whether all are finite. A sum is not finite if one of its parts is not, so one number a gradient is enough."""
    parts = [tf.reduce_sum(g.values if isinstance(g, tf.IndexedSlices) else g) for g in gradients]
    return tf.math.is_finite(tf.add_n([loss, *(tf.cast(p, tf.float32) for p in parts)]))
