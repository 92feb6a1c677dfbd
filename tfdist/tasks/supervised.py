"""Learning outputs from inputs: examples are `(x, y)` or `(x, y, sample_weight)`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UserError, build_user_error, suggest
from tfdist.tasks.keras_names import call_symbolically, check_metric_name, outputs_by_name, resolve_loss, resolve_metric
from tfdist.tasks.losses import (
    Loss,
    as_loss,
    check_class_weight,
    check_one_class,
    compute_losses,
    describe_mismatch,
    keras_mask,
    needs_whole_batch,
    takes_class_numbers,
    weigh_classes,
)
from tfdist.tasks.task import MetricSpec, Task, Term, WholeTerm, refuse_own_steps, symbolic_outputs, with_trailing_axes

MetricBuilders = Sequence[Callable[[], keras.metrics.Metric] | str]
ONLY_OUTPUT = "output"


class Prediction(NamedTuple):
    """One output, with its Keras mask and logits, which a tensor loses where it leaves a `tf.function`."""

    values: Any
    mask: tf.Tensor | None = None
    logits: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Weighted:
    """Builds a metric that is weighted as the loss is: what `compile(weighted_metrics=…)` means."""

    build: Callable[[], keras.metrics.Metric]

    def __call__(self) -> keras.metrics.Metric:
        return self.build()


class Unweighted(Weighted):
    """Builds a metric that counts every example once, whatever it weighs: what `compile(metrics=…)` means."""


class Supervised(Task):
    """A loss between targets and the model's outputs.

    A batch's loss is what Keras's `fit` on one device makes of the whole global batch: weights w and values l become
    one number by the loss's own `reduction`. Its default, "sum_over_batch_size", is Σ w·l ÷ the number of values, be
    w weights of examples or of elements (time steps); what a Keras mask or the loss itself (`ignore_class`) leaves
    out counts neither above nor below the line. Several outputs add up, each reduced on its own.

    Args:
      loss: a Keras loss, its name, or a function (y_true, y_pred) → loss of each example, which is taken as `compile`
        takes it: targets and outputs come as floats. For several outputs a dict of them by output name; None there has
        metrics alone.
      metrics: builders of Keras metrics, `@keras.metrics.SparseCategoricalAccuracy` without parentheses, or names,
        `'accuracy'`; for several outputs a dict of such lists by output name. Metrics are weighted as the loss is.
      loss_weights: for several outputs, what each loss is multiplied with; 1 where not given.
      class_weight: for one output, weights by class number that the losses of training are multiplied with, as `fit`
        does; a class without one weighs 1.

    Raises:
      UserError: an argument is something else, or names an output that has no loss.
    """

    def __init__(
        self,
        *,
        loss: Loss | str | Mapping[str, Loss | str] | None = None,
        metrics: MetricBuilders | Mapping[str, MetricBuilders] = (),
        loss_weights: Mapping[str, float] | None = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> None:
        self._single = not isinstance(loss, Mapping)
        self._losses: dict[str, Any] = dict(loss) if isinstance(loss, Mapping) else {ONLY_OUTPUT: loss}
        self._names = list(self._losses)
        if loss is None:
            self._losses = {}
        self._class_weight = check_class_weight(class_weight)
        if class_weight is not None and not self._single:
            raise UserError("class_weight is for one output. Give examples of several outputs a sample_weight.")
        self._model: keras.Model | None = None
        metrics_by_output = dict(metrics) if isinstance(metrics, Mapping) else {ONLY_OUTPUT: metrics}
        if not self._single and not isinstance(metrics, Mapping):
            if metrics:
                raise UserError("With a loss for each output, metrics is a dict of lists by output name too.")
            metrics_by_output = {}
        self._loss_weights = dict(loss_weights or {})
        for name in [*metrics_by_output, *self._loss_weights]:
            if name not in self._names:
                known = list(self._losses)
                raise UserError(f"There is no loss for the output {name!r}; losses: {known}.{suggest(name, known)}")
        wanted = {name: one for name, one in self._losses.items() if one is not None} or self._losses
        self._losses = {name: as_loss(one, name) for name, one in wanted.items()}
        self._metrics: list[tuple[str, Any]] = []
        for name, builders in metrics_by_output.items():
            if not isinstance(builders, (list, tuple)):
                raise UserError(f"metrics is {builders!r} for {name}; write a list, [@keras.metrics.AUC].")
            self._metrics += [(name, _check_builder(builder)) for builder in builders]

    def bind(self, model: keras.Model, structure: Any) -> None:
        """Resolves losses and metrics by the model's shapes."""
        refuse_own_steps(model)
        self._model = model
        if not self._losses:
            raise build_user_error(
                "Supervised.loss is not given. Write a loss: supervised.Supervised.loss = 'mean_squared_error'.",
                error_id="no-loss",
            )
        builders = [*self._losses.values(), *(b for _, b in self._metrics)]
        if any(isinstance(getattr(one, "build", one), str) for one in builders):
            self._resolve_names(model, structure)

    def _resolve_names(self, model: keras.Model, structure: Any) -> None:
        """Puts Keras's own in the place of what depends on shapes: 'crossentropy', 'accuracy'."""
        symbols = tf.nest.map_structure(lambda s: keras.KerasTensor(s.shape, s.dtype.name), structure)
        outputs = self._by_output(call_symbolically(model, self.inputs(symbols)), "The model's outputs", model)
        targets = self._targets(symbols)
        shapes = {name: (targets[name], outputs[name]) for name in self._names if name in targets}
        self._losses = {name: resolve_loss(one, *shapes[name]) for name, one in self._losses.items()}
        self._metrics = [(name, _resolve_builder(b, shapes.get(name, ()))) for name, b in self._metrics]

    def inputs(self, examples: Any) -> Any:
        """x of (x, y, …)."""
        return _unpack_examples(examples)[0]

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term | WholeTerm], Any]:
        """One term for each output with a loss."""
        examples, outputs = self._call_model(model, examples, training=training)
        return self._build_terms(examples, outputs), self._collect_predictions(outputs)

    def _call_model(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[Any, Mapping[str, Any]]:
        """The examples, weighed by class in training, and the model's outputs by name."""
        if training and self._class_weight is not None:
            examples = self._weigh_by_class(examples)
        outputs = model(self.inputs(examples), training=training)
        return examples, self._by_output(outputs, "The model's outputs", model)

    def _weigh_by_class(self, examples: Any) -> Any:
        x, y, sample_weight = _unpack_examples(examples)
        if sample_weight is not None:
            raise UserError("The data gives sample weights, and class_weight is set. Multiply them in the data.")
        assert self._class_weight is not None
        labels = self._targets(examples)[ONLY_OUTPUT]
        check_one_class(self._losses.get(ONLY_OUTPUT), labels)
        return x, y, weigh_classes(labels, self._class_weight)

    def _build_terms(self, examples: Any, outputs: Mapping[str, Any]) -> dict[str, Term | WholeTerm]:
        targets, weights, terms = self._targets(examples), self._weights(examples), {}
        for name, loss in self._losses.items():
            parts = {"y_true": targets[name], "y_pred": outputs[name], "weights": weights[name]}
            parts["mask"] = keras_mask(outputs[name])
            terms[name] = _build_term(loss, parts, self._loss_weights.get(name, 1.0))
        return terms

    def _collect_predictions(self, outputs: Mapping[str, Any]) -> dict[str, Prediction]:
        """The predictions by output, of which metrics are computed."""
        predicted = {name: outputs[name] for name, _ in self._metrics}
        return {n: Prediction(p, keras_mask(p), getattr(p, "_keras_logits", None)) for n, p in predicted.items()}

    def check_examples(self, model: keras.Model, examples: Any, split: str) -> None:
        """Looks for labels that are not classes of the model's output."""
        given = symbolic_outputs(model)
        if given is None or (not self._single and isinstance(given, keras.KerasTensor)):
            return
        outputs = self._by_output(given, "The model's outputs", model)
        targets = self._targets(examples)
        for name, loss in self._losses.items():
            if takes_class_numbers(loss):
                ignored = getattr(loss, "ignore_class", None)
                where = f"{split} data" if self._single else f"{split} data, output {name!r},"
                _check_labels(np.asarray(targets[name]), outputs[name].shape[-1], ignored, where)

    def describe_mismatches(self, model: keras.Model, outputs: Any) -> Sequence[str]:
        named = self._by_output(outputs, "The model's outputs", model)
        found = {name: describe_mismatch(loss, np.asarray(named[name])) for name, loss in self._losses.items()}
        return [text if self._single else f"{name}: {text}" for name, text in found.items() if text is not None]

    def term_names(self) -> Sequence[str]:
        return () if len(self._losses) == 1 else tuple(self._losses)

    def metric_specs(self) -> Sequence[MetricSpec]:
        return [
            MetricSpec(build, None if self._single else output, "weighted_" if type(build) is Weighted else "")
            for output, build in self._metrics
        ]

    def compile_arguments(self, metrics: Sequence[keras.metrics.Metric]) -> dict[str, Any]:
        given = [(metric, output, build) for metric, (output, build) in zip(metrics, self._metrics, strict=False)]

        def by_output(unweighted: bool) -> Any:
            some = [(metric, name) for metric, name, build in given if isinstance(build, Unweighted) == unweighted]
            if self._single:
                return [metric for metric, _ in some]
            return {name: [metric for metric, output in some if output == name] for _, name in some}

        losses = {name: getattr(loss, "unwrapped", loss) for name, loss in self._losses.items()}  # as they were given
        weights = {name: float(self._loss_weights.get(name, 1.0)) for name in self._losses if self._loss_weights}
        return {
            "loss": losses.get(ONLY_OUTPUT) if self._single else losses,
            "loss_weights": weights.get(ONLY_OUTPUT) if self._single else weights or None,
            "metrics": by_output(unweighted=True),
            "weighted_metrics": by_output(unweighted=False),
        }

    def update_metrics(self, metrics: Sequence[keras.metrics.Metric], examples: Any, outputs: Any, shares: Any) -> None:
        """Updates each metric with its output, target and weights.

        Where rows can be left out, those of other replicas are: not every metric takes weights of examples. Of none,
        which not every metric takes either, the variables stay.
        """
        if shares is None or shares.shape[0] is not None:
            self._update_metrics(metrics, examples, outputs, shares)
            return
        mine = shares > 0.0
        has_rows = tf.reduce_any(mine)
        before = [(variable, tf.identity(variable.value)) for metric in metrics for variable in metric.variables]
        own_examples, own_outputs = tf.nest.map_structure(
            lambda rows: None if rows is None else tf.boolean_mask(rows, mine | ~has_rows), (examples, outputs)
        )
        self._update_metrics(metrics, own_examples, own_outputs, None, is_part=True)
        for variable, value in before:
            variable.assign(tf.where(has_rows, variable.value, value))

    def _update_metrics(
        self, metrics: Sequence[Any], examples: Any, outputs: Any, shares: tf.Tensor | None, *, is_part: bool = False
    ) -> None:
        targets, weights = self._targets(examples), self._weights(examples)
        for metric, (output, build) in zip(metrics, self._metrics, strict=True):
            prediction = outputs[output]
            weight = _apply_shares(None if isinstance(build, Unweighted) else weights[output], shares)
            if prediction.logits is not None:
                prediction.values._keras_logits = prediction.logits  # by which a crossentropy goes
            if (mask := prediction.mask) is not None:
                prediction.values._keras_mask = mask  # which Keras's means go by, and its other metrics do not
                if not isinstance(build, Weighted):
                    weight = _apply_mask(weight, mask)
                elif weight is not None:
                    weight = with_trailing_axes(weight, max(weight.shape.rank, mask.shape.rank))
            try:
                if is_part and isinstance(metric, keras.metrics.MeanMetricWrapper):
                    values = metric._fn(targets[output], prediction.values, **metric._fn_kwargs)
                    if not tf.convert_to_tensor(values).shape.rank:
                        raise ValueError("it gives one number for a batch, of which each has another part")
                metric.update_state(targets[output], prediction.values, sample_weight=weight)
            except ValueError as error:
                if shares is None and not is_part:
                    raise
                raise UserError(
                    f"The metric {metric.name!r} takes no weights of examples, by which several replicas count each "
                    f"example once: {error}. Return a value for each example, and not their mean."
                ) from error

    def _targets(self, examples: Any) -> Mapping[str, Any]:
        y = _unpack_examples(examples)[1]
        if not self._single and len(self._losses) == 1 and not keras.tree.is_nested(y):
            return dict.fromkeys(self._losses, y)
        return self._by_output(y, "The targets")

    def _weights(self, examples: Any) -> Mapping[str, tf.Tensor | None]:
        given = _unpack_examples(examples)[2]
        if self._single:
            given = only(given)
        if isinstance(given, (list, tuple)):
            names = self._match_names(len(given))
            if len(given) != len(names):
                raise UserError(
                    f"sample_weight is a list of {len(given)}, and there are losses for {list(self._losses)}. Give one "
                    "array for each, one for all, or a dict of arrays by output name."
                )
            given = dict(zip(names, given, strict=True))
        if not isinstance(given, Mapping):
            return dict.fromkeys(self._names, _squeeze(given))
        unknown = [name for name in given if name not in (*self._names, *self._match_names(len(given)))]
        if unknown:
            raise UserError(f"There are sample weights for {unknown}, but losses for {list(self._losses)} only.")
        return {name: _squeeze(given.get(name)) for name in self._names}

    def _match_names(self, count: int) -> list[str]:
        """The names of a list of so many parts: of all outputs that the model has, or of those that have losses."""
        outputs = list(getattr(self._model, "output_names", None) or [])
        return outputs if len(outputs) == count and set(self._losses) <= set(outputs) else list(self._losses)

    def _by_output(self, value: Any, what: str, model: keras.Model | None = None) -> Mapping[str, Any]:
        """`value` by output name."""
        if self._single:
            if keras.tree.is_nested(value := only(value)):
                raise UserError(f"{what} are several; give tfdist.Supervised.loss as a dict by output name.")
            return {ONLY_OUTPUT: value}
        if isinstance(value, (list, tuple)):
            names = getattr(model, "output_names", None) or self._match_names(len(value))
            if len(names) != len(value):
                raise UserError(
                    f"{what} are a list of {len(value)}, which cannot be told apart by {list(names)}. Give a dict by "
                    "output name."
                )
            value = outputs_by_name(names, value)
        if not isinstance(value, Mapping) or set(self._losses) - set(value):
            held = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise UserError(f"{what} are {held}, but there are losses for {sorted(self._losses)}. Use the same names.")
        return value


def only(nest: Any) -> Any:
    """Unwraps a nest while it has exactly one part; returns any other nest unchanged."""
    while isinstance(nest, list | tuple | Mapping) and len(nest) == 1:
        (nest,) = nest.values() if isinstance(nest, Mapping) else nest
    return nest


def _unpack_examples(examples: Any) -> tuple[Any, Any, Any]:
    if not isinstance(examples, (tuple, list)) or not 2 <= len(examples) <= 3:
        held = f"{len(examples)} parts" if isinstance(examples, (tuple, list)) else "x alone"
        raise build_user_error(
            f"Supervised learning takes (x, y) or (x, y, sample_weight); the data gives {held}.",
            error_id="data-structure",
        )
    x, y, *rest = examples
    return x, y, rest[0] if rest else None


def _check_labels(labels: np.ndarray, num_classes: int | None, ignored: int | None, where: str) -> None:
    """Checks that labels, [n, …], are 0 … num_classes - 1, or the class that the loss ignores."""
    if num_classes is None or labels.dtype.kind not in "iuf":
        return
    wrong = (labels < 0) | (labels >= num_classes)
    if ignored is not None:
        wrong &= labels != ignored
    if not wrong.any():
        return
    place = np.argwhere(wrong)[0]
    raise build_user_error(
        f"Example {place[0]} of the {where} has the label {labels[tuple(place)]}, but the model's output is of "
        f"{num_classes} classes, 0 … {num_classes - 1}. {np.count_nonzero(wrong):,} labels are out of range. Give the "
        "model more outputs, or correct the labels.",
        error_id="labels-out-of-range",
    )


def _build_term(loss: keras.losses.Loss, parts: dict[str, Any], coefficient: float) -> Term | WholeTerm:
    """One output's term, of targets, outputs, weights and mask; of the whole batch, if the loss asks for it."""

    def term_of(parts: dict[str, Any]) -> Term:
        values, mask = compute_losses(loss, parts["y_true"], parts["y_pred"], parts.get("mask"))
        weights = parts.get("weights")
        if values.shape.num_elements() == 1 and weights is not None:
            values = tf.fill(tf.shape(weights), tf.reshape(values, []))  # as Keras weighs it
        if weights is not None and weights.shape.rank > values.shape.rank:
            raise UserError(
                f"sample_weight has the shape {weights.shape.as_list()}, but the losses have {values.shape.rank} axes. "
                "Give one weight an example, [n], or one for each of its losses."
            )
        return Term(values, weights, coefficient, loss.reduction, mask)

    held = {name: part for name, part in parts.items() if part is not None}
    term = term_of(held | {"weights": None})
    if term.values.shape.rank == 0 or needs_whole_batch(loss):
        return WholeTerm(held, term_of, coefficient)
    return term_of(held) if "weights" in held else term


def _apply_shares(weights: Any, shares: tf.Tensor | None) -> Any:
    """Multiplies sample weights by this replica's share of each example; no weights count as 1."""
    if shares is None:
        return weights
    if weights is None:
        return shares
    return tf.nest.map_structure(lambda w: tf.cast(w, tf.float32) * with_trailing_axes(shares, w.shape.rank), weights)


def _squeeze(weights: Any) -> tf.Tensor | None:
    """float32 weights, [n, …] where they are given as [n, …, 1]; None stays None."""
    if weights is None:
        return None
    weights = tf.cast(weights, tf.float32)
    return tf.squeeze(weights, -1) if (weights.shape.rank or 0) > 1 and weights.shape[-1] == 1 else weights


def _apply_mask(weights: tf.Tensor | None, mask: tf.Tensor) -> tf.Tensor:
    """The weights, zero where a Keras mask leaves out (padding of sequences)."""
    mask = tf.cast(mask, tf.float32)
    if weights is None:
        return mask
    widest = max(mask.shape.rank, weights.shape.rank)
    return with_trailing_axes(mask, widest) * with_trailing_axes(weights, widest)


def _resolve_builder(builder: Any, shapes: Sequence[Any]) -> Callable[[], keras.metrics.Metric]:
    """The builder of a metric, of a name perhaps, for such symbolic targets and outputs."""
    if isinstance(builder, Weighted):
        return dataclasses.replace(builder, build=_resolve_builder(builder.build, shapes))
    if not isinstance(builder, str):
        return builder
    check_metric_name(builder)
    return functools.partial(resolve_metric, builder, *shapes)


def _check_builder(builder: Any) -> Callable[[], keras.metrics.Metric] | str:
    if isinstance(builder, str):
        return builder
    if isinstance(builder, keras.metrics.Metric):
        raise UserError(
            f"metrics holds the metric {builder.name!r} itself; its variables must be made in the strategy's scope. "
            f"Write @keras.metrics.{type(builder).__name__} without parentheses."
        )
    if not callable(builder):
        raise UserError(f"metrics holds {builder!r}; write @keras.metrics.SparseCategoricalAccuracy or another metric.")
    return builder
