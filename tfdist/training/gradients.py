"""The gradients of one replica's part of a batch, microbatch after microbatch.

Invariant: what is returned are sums over examples, not means, so that adding them over microbatches, replicas and
workers gives the sum over the global batch (where there is nothing to add, gradients alone may be means: see
`gives_means`). No collective happens here except inside layers that ask for one
(synchronized batch normalisation).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.strategies.base import Strategy
from tfdist.tasks.base import Objective, Task, reduce_terms
from tfdist.training.metrics import MetricGroup
from tfdist.training.precision import LossScale

# From here on it is cheaper to send an embedding's rows than all of it.
SPARSE_FROM_ELEMENTS = 2**20

Gradient = tf.Tensor | tf.IndexedSlices | None


class LocalSums(NamedTuple):
    """One replica's sums over its examples.

    Attributes:
      gradients: of the summed loss, or of the mean with `gives_means`, by trainable variable; None where the loss
        does not depend on it.
      loss_sum: float32 scalar.
      weight: float32 scalar, the weight of these examples.
      term_sums: float32 scalars by loss term.
    """

    gradients: list[Gradient]
    loss_sum: tf.Tensor
    weight: tf.Tensor
    term_sums: dict[str, tf.Tensor]


class LocalGradients:
    """Forward and backward pass over one replica's batch.

    Args:
      strategy: asked to sum the weights of terms that have their own.
      model: a built model.
      task: gives the loss.
      metrics: updated with every microbatch.
      num_microbatches: into how many slices a batch comes cut.
      loss_scale: multiplies the loss before it is differentiated; None for precisions that need none.
      jit_compile: whether XLA compiles the pass.

    Attributes:
      gives_means: these examples are the whole global batch, so the gradients come divided by its weight: the backward
        pass starts with 1 ÷ weight in place of 1, which saves a pass over all of them.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        model: keras.Model,
        task: Task,
        metrics: MetricGroup,
        num_microbatches: int = 1,
        loss_scale: LossScale | None = None,
        jit_compile: bool = False,
    ) -> None:
        self._strategy = strategy
        self._model = model
        self._task = task
        self._metrics = metrics
        self._num_microbatches = num_microbatches
        self._loss_scale = loss_scale
        self.gives_means = strategy.topology.num_replicas == num_microbatches == 1 and loss_scale is None
        self._pass = tf.function(self._differentiate, jit_compile=True) if jit_compile else self._differentiate

    def __call__(self, batch: dict[str, Any]) -> LocalSums:
        """The sums over one local batch, as the pipeline gives it; in replica context."""
        scales = term_scales(self._strategy, self._task, batch)
        pieces = []
        for i in range(self._num_microbatches):
            # One after the other, so that only one microbatch's activations are alive.
            with tf.control_dependencies([pieces[-1].loss_sum] if pieces else []):
                part = _microbatch(batch, i, self._num_microbatches)
            pieces.append(self._on_microbatch(part, scales, previous=pieces[-1] if pieces else None))
        return pieces[-1]

    def _on_microbatch(self, part: dict[str, Any], scales: Any, previous: LocalSums | None) -> LocalSums:
        gradients, objective = self._pass(part, scales)
        self._task.update_metrics(self._metrics.metrics, part["examples"], objective.outputs, part.get("shares"))
        sums = LocalSums(gradients, objective.loss_sum, objective.weight, objective.term_sums)
        return sums if previous is None else _added(previous, sums)

    def _differentiate(self, part: dict[str, Any], scales: Any) -> tuple[list[Gradient], Objective]:
        variables = [v.value for v in self._model.trainable_variables]
        with tf.GradientTape() as tape:
            objective = forward(self._model, self._task, part, training=True, scales=scales)
            loss = objective.loss_sum
            if self._loss_scale is not None:
                loss *= self._loss_scale.factor()
        start = tf.math.reciprocal_no_nan(objective.weight) if self.gives_means else None
        gradients = tape.gradient(loss, variables, output_gradients=start)
        if all(g is None for g in gradients):
            raise UserError(
                "The loss does not depend on any trainable variable of the model: nothing would be learned."
            )
        return [_dense_if_small(g) for g in gradients], objective


def term_scales(strategy: Strategy, task: Task, batch: dict[str, Any]) -> dict[str, tf.Tensor] | None:
    """Global examples ÷ global weight of each loss term that has weights of its own; in replica context."""
    weights = task.term_weights(batch["examples"])
    if weights is None:
        return None
    shares = batch.get("shares")
    if shares is not None:
        weights = {name: w * shares for name, w in weights.items()}
    count, *totals = strategy.sum_over_replicas([_num_examples(batch), *(tf.reduce_sum(w) for w in weights.values())])
    return {name: tf.math.divide_no_nan(count, total) for name, total in zip(weights, totals, strict=True)}


def forward(model: keras.Model, task: Task, part: dict[str, Any], *, training: bool, scales: Any = None) -> Objective:
    """Calls the model on one (micro)batch and adds up its loss, the model's regularisation included."""
    terms, outputs = task.terms(model, part["examples"], training=training)
    return reduce_terms(
        terms,
        count=_num_examples(part),
        shares=part.get("shares"),
        scales=scales,
        regularisation=model.losses,
        outputs=outputs,
    )


def _num_examples(part: dict[str, Any]) -> tf.Tensor:
    if "shares" in part:
        return tf.reduce_sum(part["shares"])
    return tf.cast(tf.shape(tf.nest.flatten(part["examples"])[0])[0], tf.float32)


def _microbatch(batch: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """Slice `index` of the `count` that the batch's `splits` mark."""
    rows = {name: value for name, value in batch.items() if name != "splits"}
    if count == 1:
        return rows
    first, last = batch["splits"][index], batch["splits"][index + 1]
    return tf.nest.map_structure(lambda t: t[first:last], rows)


def _added(a: LocalSums, b: LocalSums) -> LocalSums:
    return LocalSums(
        [_plus(x, y) for x, y in zip(a.gradients, b.gradients, strict=True)],
        a.loss_sum + b.loss_sum,
        a.weight + b.weight,
        {name: a.term_sums[name] + b.term_sums[name] for name in a.term_sums},
    )


def _plus(a: Gradient, b: Gradient) -> Gradient:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, tf.IndexedSlices):
        values, indices = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, indices, a.dense_shape)
    return a + b


def _dense_if_small(gradient: Gradient) -> Gradient:
    """Keeps the gradient of a large embedding as the rows that were looked up, others as a tensor."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.get_static_value(gradient.dense_shape)
    if shape is not None and math.prod(shape) >= SPARSE_FROM_ELEMENTS:
        return gradient
    return tf.convert_to_tensor(gradient)
