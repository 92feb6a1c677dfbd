"""Tasks: how a batch becomes a loss.

A task turns a model's outputs on some examples into loss terms, value by value and unreduced, and says of each how its
values become one number. Invariant: `reduce_terms` gives sums over examples, numerators and divisors apart, and the
step divides the one by the other after it has summed both over the whole global batch. That is why neither the number
of replicas nor that of microbatches changes the loss.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.strategies.strategy import num_replicas, replica_index
from tfdist.strategies.sums import gather_rows
from tfdist.user_code import where_defined

ROWS = "rows"  # the divisor of a mean over the batch
ONE = "one"  # the divisor of a sum
MEANS = ("sum_over_batch_size", "mean")
REDUCTIONS = (*MEANS, "mean_with_sample_weight", "sum", "none", None)
# Methods of Keras's trainer; one that a model overrides is called, see training/step/own_step.py, or refused.
STEPS = ("train_step", "test_step", "compute_loss", "compute_metrics", "get_metrics_result")


@dataclasses.dataclass(frozen=True)
class Term:
    """One term of the loss.

    Attributes:
      values: float32 [n, …], the loss of each example, or of each element of it.
      weights: float32, broadcastable to `values` once axes are added behind; None counts every value once.
      coefficient: what the term is multiplied with in the total.
      reduction: how weighted values become one number, in Keras's words. "mean_with_sample_weight" divides their sum by
        that of the weights; "sum_over_batch_size" and "mean" by the number of values, weighted or not; "sum" does not
        divide. "none" is what Keras's `fit` makes of it: the sum is differentiated and the mean is shown.
      mask: bool or float32, shaped as `weights` may be. What it leaves out counts neither above nor below the line.
    """

    values: tf.Tensor
    weights: tf.Tensor | None = None
    coefficient: float = 1.0
    reduction: str | None = "mean_with_sample_weight"
    mask: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class WholeTerm:
    """A term that is computed from the whole global batch at once, on every replica.

    Attributes:
      parts: nest of tensors [n, …], what this replica's examples give for it.
      term: makes a term of such a nest with the rows of all replicas. Its `values` may be a scalar, which is the loss.
      coefficient: what the term is multiplied with in the total.
    """

    parts: Any
    term: Callable[[Any], Term]
    coefficient: float = 1.0


def scale_term(term: Term | WholeTerm, factor: Any) -> Term | WholeTerm:
    """The term, counted `factor` times as much in the total; a number or a scalar tensor."""
    return dataclasses.replace(term, coefficient=factor * term.coefficient)


@dataclasses.dataclass(frozen=True)
class MetricSpec:
    """A metric to build, and how it is called in what is logged.

    Attributes:
      build: makes it.
      output: of the model, of several, that it belongs to.
      repeat_prefix: goes before a name that another metric of the output has; without one, a number follows.
    """

    build: Callable[[], keras.metrics.Metric]
    output: str | None = None
    repeat_prefix: str = ""


class Task(abc.ABC):
    """A way to learn from examples. Subclass it where `Supervised` does not fit."""

    def bind(self, model: keras.Model, structure: Any) -> None:
        """Learns what it will be used with, before metrics are made; in the strategy's scope.

        Args:
          model: built.
          structure: nest of `tf.TensorSpec`s of a batch of examples.

        Raises:
          UserError: it cannot be used with them.
        """

    @abc.abstractmethod
    def inputs(self, examples: Any) -> Any:
        """The part of `examples` that the model is called with; also used on specs, to build the model."""

    @abc.abstractmethod
    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term | WholeTerm], Any]:
        """Calls the model; the loss terms by name, and the outputs that `update_metrics` wants."""

    def describe_mismatches(self, model: keras.Model, outputs: Any) -> Sequence[str]:
        """Sentences on outputs of the model, a nest of arrays, that are of another kind than what the loss takes."""
        return ()

    def term_names(self) -> Sequence[str]:
        """Names of the terms to report beside the total; none where the total says it all."""
        return ()

    def check_examples(self, model: keras.Model, examples: Any, split: str) -> None:
        """Looks at all examples of a split that lies in memory, a nest of arrays, before any is computed on.

        Raises:
          UserError: the model cannot learn from one of them.
        """

    def metric_specs(self) -> Sequence[MetricSpec]:
        """The metrics to compute beside the loss."""
        return ()

    def compile_arguments(self, metrics: Sequence[keras.metrics.Metric]) -> dict[str, Any] | None:
        """The loss and metrics that `keras.Model.compile` would be given for this task, after `bind`.

        Callbacks find their `self.model` compiled with them. `metrics` are built from `metric_specs` in their order.
        None where `compile` has no words for the task.
        """
        return None

    def update_metrics(self, metrics: Sequence[keras.metrics.Metric], examples: Any, outputs: Any, shares: Any) -> None:
        """Updates `metrics`, built from `metric_specs` in their order.

        `shares`, float32 [n] or None, multiplies the weights: 0 where an example is another replica's, else 1.
        """


class OwnSteps(Task):
    """Placeholder task of a model that trains by its own steps, or without a loss; its `terms` fails."""

    def inputs(self, examples: Any) -> Any:
        """x of (x, y, sample_weight)."""
        return keras.utils.unpack_x_y_sample_weight(examples)[0]

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> NoReturn:
        raise AssertionError("The model's own steps compute its losses.")


class Objective(NamedTuple):
    """Sums over one replica's examples, by the divisor that they are to be divided by when all replicas have added.

    Attributes:
      numerators: float32 scalars to differentiate; Σ numerator ÷ divisor is the loss, coefficients and regularization
        included.
      divisors: float32 scalars, `ROWS` (the number of examples) always among them.
      shown: float32 scalars; Σ shown ÷ divisor is the loss to report. It differs from the numerators for a
        term with reduction "none", and for a `WholeTerm`, which every replica differentiates whole.
      term_sums: the same for each term alone, without coefficient, by divisor and name.
      weight: one float32 scalar, what the examples weigh in all by absolute value; 0 where nothing can be learned from
        them. Empty where each of them counts, whatever the batch.
      outputs: the model's, for the metrics, where it was called.
    """

    numerators: dict[str, tf.Tensor]
    divisors: dict[str, tf.Tensor]
    shown: dict[str, tf.Tensor]
    term_sums: dict[str, dict[str, tf.Tensor]]
    weight: tuple[tf.Tensor, ...]
    outputs: Any = ()


def reduce_terms(
    terms: Mapping[str, Term | WholeTerm],
    *,
    count: tf.Tensor,
    shares: tf.Tensor | None,
    num_parts: int,
    batch_size: int,
    penalties: Sequence[tf.Tensor],
    added: Sequence[tf.Tensor],
) -> Objective:
    """Adds up one replica's loss terms.

    Args:
      terms: the terms by name.
      count: float32 scalar, this replica's examples, the sum of its shares.
      shares: float32 [n], how much of each example is this replica's; None: all of each.
      num_parts: into how many such parts the global batch is cut, over replicas and microbatches.
      batch_size: the most examples of a global batch.
      penalties: scalars that depend on the weights alone, and count once in the loss.
      added: scalars that depend on these examples (`add_loss`, activity regularizers), each a mean over them.

    Raises:
      UserError: a term needs the whole batch, and it comes in microbatches or padded.
    """
    numerators: dict[str, tf.Tensor] = {}
    divisors = {ROWS: count}
    shown: dict[str, tf.Tensor] = {}
    term_sums: dict[str, dict[str, tf.Tensor]] = {}
    weights = []
    for name, term in terms.items():
        if isinstance(term, WholeTerm):
            sums = _sum_whole_term(name, term, count, shares, num_parts, batch_size)
        else:
            owner = next(other for other, t in terms.items() if t is term or _has_same_divisor(t, term))
            sums = _sum_term(f"weights of {owner}", term, count, shares, num_parts)
        divisors |= {sums.divided_by: sums.divisor}
        _add_to(numerators, sums.divided_by, term.coefficient * sums.numerator)
        _add_to(shown, sums.shown_by, term.coefficient * sums.shown)
        term_sums.setdefault(sums.shown_by, {})[name] = sums.shown
        weights.append(sums.weight)
    if added:
        weights.append(None)
    if penalties:
        # Its own divisor adds up to itself, so any will do; one that is there already needs no gradients apart.
        by = ROWS if ROWS in numerators else next(iter(numerators))
        penalty = divisors[by] * tf.add_n([tf.cast(p, tf.float32) for p in penalties])
        _add_to(numerators, by, penalty)
        _add_to(shown, by, penalty)
    if added:
        mean = count * tf.add_n([tf.cast(tf.reduce_sum(a), tf.float32) for a in added])
        _add_to(numerators, ROWS, mean)
        _add_to(shown, ROWS, mean)
    weight = () if any(w is None for w in weights) else (tf.add_n(weights),)
    return Objective(numerators, divisors, shown, term_sums, weight)


def round_shares(shares: tf.Tensor) -> tf.Tensor:
    """Shares of 0 and 1: an example that several replicas have is all the first one's."""
    return tf.where(tf.equal(replica_index(), 0), tf.math.ceil(shares), tf.math.floor(shares))


def overrides(model: keras.Model, method: str) -> bool:
    """True where the model's class has another `method` than Keras's."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def refuse_own_steps(model: keras.Model) -> None:
    """Raises UserError where a task is to train a model that says by itself how it is trained."""
    for method in STEPS:
        if overrides(model, method):
            where = where_defined(getattr(type(model), method))
            raise UserError(
                f"{type(model).__name__} has a {method} of its own{where}, which train.task would not call. Leave "
                "train.task and train.optimizer out, and compile the model. Or take the method out."
            )


def symbolic_outputs(model: keras.Model) -> Any:
    """A model's symbolic outputs; None of a subclassed model that was not called, or has several in a nest."""
    try:  # Keras's Sequential has no `output` before it is called
        outputs = model.outputs[0] if isinstance(model, keras.Sequential) else model.output
    except (AttributeError, ValueError):
        return None
    return None if isinstance(outputs, list) and not hasattr(model, "outputs") else outputs  # Keras flattens these


def symbolic_inputs(model: keras.Model) -> Any:
    """A model's symbolic inputs, in the nest that it takes; None of one that does not say it."""
    try:
        return model.input
    except (AttributeError, ValueError):
        return None


class _Sums(NamedTuple):
    """One term's sums, the names of the divisors of both, and the first one's value.

    `weight` is that of its values, the absolute one; None where each counts once.
    """

    numerator: tf.Tensor
    divided_by: str
    divisor: tf.Tensor
    shown: tf.Tensor
    shown_by: str
    weight: tf.Tensor | None


def _sum_whole_term(
    name: str, term: WholeTerm, count: tf.Tensor, shares: tf.Tensor | None, num_parts: int, batch_size: int
) -> _Sums:
    """The loss of the whole batch, which every replica has; it is differentiated on each, and counts once.

    An example that several replicas share is the first one's.
    """
    if num_parts != num_replicas():
        raise UserError(
            f"The loss {name!r} is computed from the whole batch at once, which num_microbatches cuts up. Write "
            "train.num_microbatches = 1, or a loss whose static shape has one number for each example."
        )
    parts = tf.nest.flatten(term.parts)
    logits = {index: part._keras_logits for index, part in enumerate(parts) if hasattr(part, "_keras_logits")}
    if shares is not None and parts[0].shape[0] is not None:
        raise UserError(
            f"The loss {name!r} is computed from the whole batch at once. A TPU's batches are padded to one shape, and "
            "the rows that count cannot be taken out of them there. Use GPUs, or a loss that gives one number for each "
            "example."
        )
    if shares is not None:
        mine = round_shares(shares) > 0.0
        parts = [tf.boolean_mask(part, mine) for part in parts]
        logits = {index: tf.boolean_mask(part, mine) for index, part in logits.items()}
    gathered = gather_rows([*parts, *logits.values()], room=batch_size)
    for index, rows in zip(logits, gathered[len(parts) :], strict=True):
        gathered[index]._keras_logits = rows  # by which Keras's crossentropies go
    whole = term.term(tf.nest.pack_sequence_as(term.parts, gathered[: len(parts)]))
    weight = None
    if whole.values.shape.rank == 0:
        loss = shown = whole.values
    else:
        rows = tf.cast(tf.shape(whole.values)[0], tf.float32)
        sums = _sum_term(name, whole, rows, None, 1)
        loss = tf.math.divide_no_nan(sums.numerator, sums.divisor)
        shown = tf.math.divide_no_nan(sums.shown, rows if sums.shown_by == ROWS else sums.divisor)
        weight = None if sums.weight is None else sums.weight / num_parts
    return _Sums(loss, ONE, tf.constant(1.0 / num_parts), shown / num_parts, ONE, weight)


def _has_same_divisor(a: Term | WholeTerm, b: Term) -> bool:
    """True where both have the very same weights, one for each example."""
    if isinstance(a, WholeTerm):
        return False
    same = a.reduction == b.reduction and a.weights is b.weights and a.mask is b.mask
    return same and a.values.shape.rank == b.values.shape.rank == 1


def _sum_term(own: str, term: Term, count: tf.Tensor, shares: tf.Tensor | None, num_parts: int) -> _Sums:
    total = tf.reduce_sum(_multiply(term.values, term.weights, term.mask, shares))
    is_weighted = term.weights is not None or term.mask is not None
    full = _broadcast_factors(term.values, term.weights, term.mask, shares) if is_weighted else None
    weight = None if full is None else tf.reduce_sum(tf.abs(full))
    if term.reduction in ("sum", "none", None):
        one = tf.constant(1.0 / num_parts)
        if term.reduction == "sum":
            return _Sums(total, ONE, one, total, ONE, weight)
        return _Sums(total, ONE, one, total / _values_per_row(term.values), ROWS, weight)
    if term.reduction in MEANS and term.mask is not None:
        divisor = tf.reduce_sum(_broadcast_factors(term.values, term.mask, shares))
        return _Sums(total, own, divisor, total, own, weight)
    if term.reduction in MEANS or full is None:
        total /= _values_per_row(term.values)
        return _Sums(total, ROWS, count, total, ROWS, weight)
    return _Sums(total, own, tf.reduce_sum(full), total, own, weight)


def _add_to(sums: dict[str, tf.Tensor], name: str, value: tf.Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value


def _multiply(values: tf.Tensor, *factors: tf.Tensor | None) -> tf.Tensor:
    """The values times the factors that are not None, each [n, …] with axes added behind."""
    for factor in factors:
        if factor is not None:
            values *= with_trailing_axes(tf.cast(factor, values.dtype), values.shape.rank)
    return values


def _broadcast_factors(values: tf.Tensor, *factors: tf.Tensor | None) -> tf.Tensor:
    """The factors' product, as large as `values`."""
    return _multiply(tf.ones_like(values), *factors)


def _values_per_row(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_prod(tf.shape(values)[1:]), tf.float32)


def with_trailing_axes(weights: tf.Tensor, rank: int) -> tf.Tensor:
    """`weights`, [n] say, with axes of length 1 behind, so that they multiply values of `rank` axes."""
    return tf.reshape(weights, tf.concat([tf.shape(weights), tf.ones([rank - weights.shape.rank], tf.int32)], axis=0))
