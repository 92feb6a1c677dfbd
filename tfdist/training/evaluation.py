"""Evaluation: each example once, on however many replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.pipeline import dispose
from tfdist.strategies.base import Strategy
from tfdist.tasks.base import Task
from tfdist.training.gradients import forward, term_scales
from tfdist.training.metrics import MetricGroup


class Evaluator:
    """Evaluates a model on one split, again and again.

    Args:
      strategy: connected.
      model: built inside the strategy's scope.
      task: gives loss and metrics.
      metrics: of this split, made inside the scope.
      iterator: an endless stream of local batches in a fixed order, `num_steps` of which are the split.
      num_steps: steps of one pass.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        model: keras.Model,
        task: Task,
        metrics: MetricGroup,
        iterator: Iterator[Any],
        num_steps: int,
    ) -> None:
        self._strategy = strategy
        self._model = model
        self._task = task
        self._metrics = metrics
        self._term_names: Sequence[str] = task.term_names()
        self._iterator = iterator
        self._num_steps = num_steps
        with strategy.scope():
            self._sums = LossSums(num_terms=len(self._term_names))
        self._run = tf.function(self._pass, autograph=False)

    def evaluate(self) -> dict[str, Any]:
        """One pass over the split; the loss and every metric over all its examples. Every worker calls it."""
        results = self._run(self._iterator, tf.constant(self._num_steps))
        return to_python(results)

    def close(self) -> None:
        """Lets the stream go, without waiting for it. Nothing can be evaluated afterwards."""
        iterator, self._iterator = self._iterator, None
        dispose(iterator)

    def _pass(self, iterator: Iterator[Any], num_steps: tf.Tensor) -> dict[str, tf.Tensor]:
        def step(index: tf.Tensor) -> tuple[tf.Tensor]:
            self._strategy.run(self._on_replica, args=(next(iterator),))
            return (index + 1,)

        self._strategy.run(self._reset)
        tf.while_loop(lambda i: i < num_steps, step, [tf.constant(0)], parallel_iterations=1)
        return self._strategy.first_local(self._strategy.run(self._results))

    def _reset(self) -> None:
        self._metrics.reset()
        self._sums.reset_state()

    def _on_replica(self, batch: dict[str, Any]) -> None:
        scales = term_scales(self._strategy, self._task, batch)
        objective = forward(self._model, self._task, batch, training=False, scales=scales)
        self._task.update_metrics(self._metrics.metrics, batch["examples"], objective.outputs, batch.get("shares"))
        terms = [objective.term_sums[name] for name in self._term_names]
        self._sums.update_state(tf.stack([objective.loss_sum, objective.weight, *terms]))

    def _results(self) -> dict[str, tf.Tensor]:
        (sums,) = self._strategy.sum_over_replicas([tf.convert_to_tensor(self._sums.sums.value)])
        loss_sum, weight, *terms = tf.unstack(sums)
        results = {"loss": tf.math.divide_no_nan(loss_sum, weight)}
        for name, term in zip(self._term_names, terms, strict=True):
            results[f"{name}_loss"] = tf.math.divide_no_nan(term, weight)
        return results | self._metrics.read(self._strategy)


class LossSums(keras.metrics.Metric):
    """[loss sum, weight, term sums…] over the examples that this replica has seen."""

    def __init__(self, num_terms: int) -> None:
        super().__init__(name="loss_sums")
        self.sums = self.add_variable(shape=(2 + num_terms,), initializer="zeros", name="sums")

    def update_state(self, sums: tf.Tensor) -> None:
        self.sums.assign_add(sums)

    def result(self) -> tf.Tensor:
        return tf.math.divide_no_nan(self.sums[0], self.sums[1])


def to_python(results: dict[str, tf.Tensor]) -> dict[str, Any]:
    """Scalars as floats, vectors as lists."""
    return {name: value.numpy().tolist() for name, value in results.items()}
