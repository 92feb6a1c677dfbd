"""What is learned: how a batch becomes a loss.

A task turns a model's outputs on some examples into loss terms, value by value and unreduced. What the terms add up
to over microbatches, replicas and workers is not its affair: `reduce_terms` gives sums and weights, and the step
divides the one by the other after it has summed both over the whole global batch. That is why the number of replicas
does not change the loss.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Term:
    """One term of the loss.

    Attributes:
      values: float32 [n, …], the loss of each example, or of each element of it.
      weights: float32, broadcastable to `values`, or [n] beside other terms; None counts every value once.
      coefficient: what the term is multiplied with in the total.
    """

    values: tf.Tensor
    weights: tf.Tensor | None = None
    coefficient: float = 1.0


@dataclasses.dataclass(frozen=True)
class MetricSpec:
    """A metric to build, and how it is called in what is logged."""

    build: Callable[[], keras.metrics.Metric]
    output: str | None = None


class Task(abc.ABC):
    """How a model learns from examples. Subclass it where `Supervised` does not fit."""

    @abc.abstractmethod
    def inputs(self, examples: Any) -> Any:
        """The part of `examples` that the model is called with; also used on specs, to build the model."""

    @abc.abstractmethod
    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term], Any]:
        """Calls the model; the loss terms by name, and the outputs that `update_metrics` wants."""

    def term_names(self) -> Sequence[str]:
        """Names of the terms to report beside the total; none where the total says it all."""
        return ()

    def term_weights(self, examples: Any) -> dict[str, tf.Tensor] | None:
        """float32 [n] weights by term, known before the model is called; None when all terms share theirs.

        Terms with weights of their own are each divided by their own weight over the global batch, which therefore
        has to be summed over the replicas before the gradients are: a second, small reduction in each step.
        """
        del examples
        return None

    def check_examples(self, model: keras.Model, examples: Any, split: str) -> None:
        """Looks at all examples of a split that lies in memory, a nest of arrays, before any is computed on.

        Raises:
          UserError: the model cannot learn from one of them.
        """

    def metric_specs(self) -> Sequence[MetricSpec]:
        """The metrics to compute beside the loss."""
        return ()

    def update_metrics(self, metrics: Sequence[keras.metrics.Metric], examples: Any, outputs: Any, shares: Any) -> None:
        """Updates `metrics`, built from `metric_specs` in their order.

        `shares`, float32 [n] or None, multiplies the weights: how much of each example is this replica's.
        """


class Objective(NamedTuple):
    """Sums over one replica's examples; `loss_sum` over all replicas ÷ `weight` over all replicas is the loss.

    Attributes:
      loss_sum: float32 scalar, coefficients and regularisation included.
      weight: float32 scalar.
      term_sums: float32 scalars by term, without coefficients; empty when there is just one.
      outputs: the model's, for the metrics.
    """

    loss_sum: tf.Tensor
    weight: tf.Tensor
    term_sums: dict[str, tf.Tensor]
    outputs: Any


def reduce_terms(
    terms: Mapping[str, Term],
    *,
    count: tf.Tensor,
    shares: tf.Tensor | None,
    scales: Mapping[str, tf.Tensor] | None,
    regularisation: Sequence[tf.Tensor],
    outputs: Any,
) -> Objective:
    """Adds up one replica's loss terms.

    Args:
      terms: the terms by name.
      count: float32 scalar, this replica's examples, the sum of its shares.
      shares: float32 [n], how much of each example is this replica's; None: all of each.
      scales: for terms with weights of their own: global examples ÷ global weight by term.
      regularisation: scalars that count once in the loss, whatever the number of replicas.
      outputs: passed on.
    """
    sums: dict[str, tf.Tensor] = {}
    weight = count
    if len(terms) == 1 and scales is None:
        ((name, term),) = terms.items()
        weights = _shared_out(_full_weights(term), shares)
        sums[name], weight = tf.reduce_sum(term.values * weights), tf.reduce_sum(weights)
    else:
        shared = _shared_weights(terms, scales)
        if shared is not None:
            weight = tf.reduce_sum(_shared_out(shared, shares))
        for name, term in terms.items():
            axes = list(range(1, term.values.shape.rank))
            values = tf.reduce_mean(term.values, axes) if axes else term.values
            weights = tf.ones_like(values) if term.weights is None else tf.reshape(term.weights, [-1])
            total = tf.reduce_sum(values * _shared_out(weights, shares))
            sums[name] = total if scales is None else total * scales[name]
    loss_sum = tf.add_n([terms[name].coefficient * sums[name] for name in terms])
    if regularisation:
        loss_sum += weight * tf.add_n([tf.cast(r, tf.float32) for r in regularisation])
    return Objective(loss_sum, weight, sums if len(sums) > 1 else {}, outputs)


def with_trailing_axes(weights: tf.Tensor, rank: int) -> tf.Tensor:
    """`weights`, [n] say, with axes of length 1 behind, so that they multiply values of `rank` axes."""
    return tf.reshape(weights, tf.concat([tf.shape(weights), tf.ones([rank - weights.shape.rank], tf.int32)], axis=0))


def _full_weights(term: Term) -> tf.Tensor:
    if term.weights is None:
        return tf.ones_like(term.values)
    return tf.broadcast_to(with_trailing_axes(term.weights, term.values.shape.rank), tf.shape(term.values))


def _shared_weights(terms: Mapping[str, Term], scales: Mapping[str, tf.Tensor] | None) -> tf.Tensor | None:
    """The weights [n] that all terms have in common; None where they have none, or each its own."""
    first = next(iter(terms.values())).weights
    return None if scales is not None or first is None else tf.reshape(first, [-1])


def _shared_out(weights: tf.Tensor, shares: tf.Tensor | None) -> tf.Tensor:
    return weights if shares is None else weights * with_trailing_axes(shares, weights.shape.rank)
