"""Learning outputs from inputs: examples are `(x, y)` or `(x, y, sample_weight)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError, suggest
from tfdist.tasks.base import MetricSpec, Task, Term, with_trailing_axes

Loss = keras.losses.Loss | Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
MetricBuilders = Sequence[Callable[[], keras.metrics.Metric]]
ONLY_OUTPUT = "output"


class Supervised(Task):
    """A loss between targets and the model's outputs.

    A batch's loss is the weighted sum over the global batch divided by its global weight: with weights w and values l,
    Σ w·l / Σ w. Several outputs add up, each a mean of its own.

    Args:
      loss: a Keras loss, or a function (y_true, y_pred) → loss of each example. For several outputs a dict of them by
        output name.
      metrics: builders of Keras metrics, `@keras.metrics.SparseCategoricalAccuracy` without parentheses; for several
        outputs a dict of such lists by output name. Metrics are weighted as the loss is.
      loss_weights: for several outputs, what each loss is multiplied with; 1 where not given.

    Raises:
      UserError: an argument is something else, or names an output that has no loss.
    """

    def __init__(
        self,
        *,
        loss: Loss | Mapping[str, Loss],
        metrics: MetricBuilders | Mapping[str, MetricBuilders] = (),
        loss_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._single = not isinstance(loss, Mapping)
        self._losses = {ONLY_OUTPUT: loss} if self._single else dict(loss)
        metrics_by_output = dict(metrics) if isinstance(metrics, Mapping) else {ONLY_OUTPUT: metrics}
        if not self._single and not isinstance(metrics, Mapping):
            if metrics:
                raise UserError("With a loss for each output, metrics is a dict of lists by output name too.")
            metrics_by_output = {}
        self._loss_weights = dict(loss_weights or {})
        for name in [*metrics_by_output, *self._loss_weights]:
            if name not in self._losses:
                known = list(self._losses)
                raise UserError(f"There is no loss for the output {name!r}; losses: {known}.{suggest(name, known)}")
        for name, one in self._losses.items():
            if not callable(one):
                raise UserError(
                    f"loss is {one!r} for {name}; write a Keras loss such as @keras.losses.MeanSquaredError()."
                )
        self._metrics = [(o, _checked_builder(b)) for o, builders in metrics_by_output.items() for b in builders]

    def inputs(self, examples: Any) -> Any:
        return _parts(examples)[0]

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term], Any]:
        x, _, _ = _parts(examples)
        outputs = self._named(model(x, training=training), "The model's outputs", model)
        targets = self._targets(examples)
        weights = self._weights(examples)
        terms = {}
        for name, loss in self._losses.items():
            values = _loss_values(loss, targets[name], outputs[name])
            terms[name] = Term(
                values, _with_mask(weights[name], outputs[name], values), self._loss_weights.get(name, 1.0)
            )
        return terms, outputs

    def term_names(self) -> Sequence[str]:
        return () if self._single else tuple(self._losses)

    def term_weights(self, examples: Any) -> dict[str, tf.Tensor] | None:
        given = _parts(examples)[2]
        if self._single or not isinstance(given, Mapping):
            return None
        targets = self._targets(examples)
        return {
            name: tf.ones(tf.shape(tf.nest.flatten(targets[name])[0])[:1])
            if weight is None
            else tf.reshape(weight, [-1])
            for name, weight in self._weights(examples).items()
        }

    def metric_specs(self) -> Sequence[MetricSpec]:
        return [MetricSpec(build, None if self._single else output) for output, build in self._metrics]

    def update_metrics(self, metrics: Sequence[keras.metrics.Metric], examples: Any, outputs: Any, shares: Any) -> None:
        targets, weights = self._targets(examples), self._weights(examples)
        for metric, (output, _) in zip(metrics, self._metrics, strict=True):
            weight = weights[output]
            if shares is not None:
                weight = shares if weight is None else weight * with_trailing_axes(shares, weight.shape.rank)
            metric.update_state(targets[output], outputs[output], sample_weight=weight)

    def _targets(self, examples: Any) -> Mapping[str, Any]:
        return self._named(_parts(examples)[1], "The targets")

    def _weights(self, examples: Any) -> Mapping[str, tf.Tensor | None]:
        given = _parts(examples)[2]
        if isinstance(given, Mapping):
            return {name: None if name not in given else tf.cast(given[name], tf.float32) for name in self._losses}
        return dict.fromkeys(self._losses, None if given is None else tf.cast(given, tf.float32))

    def _named(self, value: Any, what: str, model: keras.Model | None = None) -> Mapping[str, Any]:
        """`value` by output name."""
        if self._single:
            if isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and len(value) != 1):
                raise UserError(f"{what} are several; give Supervised.loss as a dict by output name.")
            return {ONLY_OUTPUT: value[0] if isinstance(value, (list, tuple)) else value}
        if isinstance(value, (list, tuple)):
            names = getattr(model, "output_names", None) or list(self._losses)
            value = dict(zip(names, value, strict=False))
        if not isinstance(value, Mapping) or set(self._losses) - set(value):
            held = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise UserError(f"{what} are {held}, but there are losses for {sorted(self._losses)}. Use the same names.")
        return value


def _parts(examples: Any) -> tuple[Any, Any, Any]:
    if not isinstance(examples, (tuple, list)) or not 2 <= len(examples) <= 3:
        held = f"{len(examples)} parts" if isinstance(examples, (tuple, list)) else type(examples).__name__
        raise UserError(f"Supervised learning takes (x, y) or (x, y, sample_weight); the data gives {held}.")
    x, y, *rest = examples
    return x, y, rest[0] if rest else None


def _loss_values(loss: Loss, y_true: Any, y_pred: Any) -> tf.Tensor:
    """float32 [n, …] losses, unreduced: a Keras loss's `call` comes before its own weighting and reduction."""
    y_pred = tf.nest.map_structure(lambda t: tf.cast(t, tf.float32), y_pred)
    values = loss.call(y_true, y_pred) if isinstance(loss, keras.losses.Loss) else loss(y_true, y_pred)
    values = tf.cast(values, tf.float32)
    if values.shape.rank == 0:
        raise UserError(
            f"The loss {getattr(loss, '__name__', loss)!r} returns one number for the whole batch. Return the loss of "
            "each example, shape [n]; tfdist sums and averages over the global batch."
        )
    return values


def _with_mask(weights: tf.Tensor | None, y_pred: Any, values: tf.Tensor) -> tf.Tensor | None:
    """Weights that leave out what a Keras mask on the output leaves out (padding of sequences)."""
    mask = getattr(y_pred, "_keras_mask", None)
    if mask is None or mask.shape.rank != values.shape.rank:
        return weights
    mask = tf.cast(mask, tf.float32)
    return mask if weights is None else mask * with_trailing_axes(weights, mask.shape.rank)


def _checked_builder(builder: Any) -> Callable[[], keras.metrics.Metric]:
    if isinstance(builder, keras.metrics.Metric):
        raise UserError(
            f"metrics holds the metric {builder.name!r} itself; its variables must be made in the strategy's scope. "
            f"Write @keras.metrics.{type(builder).__name__} without parentheses."
        )
    if not callable(builder):
        raise UserError(f"metrics holds {builder!r}; write @keras.metrics.SparseCategoricalAccuracy or another metric.")
    return builder
