"""The training step of a model with a `train_step` of its own, on any number of replicas.

Each replica runs the model's own step, unchanged, on its rows of the batch. The step's losses are taken to be means
over the batch that it gets. So the global batch's value is the mean of the replicas' values, weighted by their rows:
gradients are averaged so whenever an optimizer's `apply` is called, before it clips; and so are what a metric is given
without rows, what the step returns beside results of metrics, and what it assigns to the model's variables. Keras's
division of losses by the number of replicas is off. Invariant: after an `apply` every replica holds the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from tfdist.data.batches import BatchPlan
from tfdist.data.sources.source import Source
from tfdist.data.sources.user_dataset import StreamSource
from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches, SharedPatch
from tfdist.keras_patches.random_by_place import FixedShapes, draw_for_rows, record_fixed_shapes
from tfdist.strategies.strategy import Strategy, replica_index, sum_repeated_rows
from tfdist.tasks.task import round_shares
from tfdist.training.step.gradients import explain_errors, make_dense_if_small
from tfdist.training.step.layer_state import NONE
from tfdist.training.step.metrics import MetricGroup, result_of
from tfdist.training.step.normalization import batch_norm_layers, weighted_reductions
from tfdist.training.step.optimizer import disable_reduction
from tfdist.training.step.precision import as_tf_function
from tfdist.training.step.randomness import find_rows, seed_generators
from tfdist.training.step.state import Learner
from tfdist.training.step.step import StepResult, TrainStep, are_finite, multiply_gradient

UPDATING = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)  # whose `apply` updates by itself


class Rows:
    """The rows of one replica while its step is traced.

    Attributes:
      share: how much each of its rows counts: less than 1 where every replica has all rows. None: 1.
      weight: of this replica in a mean over all of them: its rows ÷ those of the global batch. None: it is alone.
      are_finite: of each `apply` so far, whether its gradients are.
      graph: that the step is traced in.
    """

    def __init__(self, strategy: Strategy, own: tf.Tensor, whole: tf.Tensor, share: tf.Tensor | None) -> None:
        self._strategy = strategy
        self._own, self._whole = own, whole
        self.share = share
        self.weight = own / whole if strategy.topology.num_replicas > 1 else None
        self.are_finite: list[tf.Tensor] = []
        self.is_applying = False
        self.graph = tf.compat.v1.get_default_graph()

    def average(self, tensors: Sequence[Any]) -> list[Any]:
        """The means over the rows of all replicas; None stays None. A whole number that all have keeps its bits."""
        present = [each for each in tensors if each is not None]
        if self.weight is not None and present:
            parts = [multiply_gradient(each, self._own) for each in present]
            present = [_divide(each, self._whole) for each in self._strategy.sum_gradients(parts, [])[0]]
        remaining = iter(present)
        return [None if each is None else next(remaining) for each in tensors]


def _divide(gradient: Any, divisor: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_divide(gradient.values, divisor), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(divisor, gradient.dtype)


_thread = threading.local()  # of one replica perhaps


def _find_rows() -> Rows | None:
    return getattr(_thread, "rows", None)


def _scale_outside_steps(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Scales losses but within a step, whose gradients are no sums over replicas."""
    return lambda value: scale(value) if _find_rows() is None else value


_UNSCALED = SharedPatch(
    keras_loss,
    scale_loss_for_distribution=_scale_outside_steps(keras_loss.scale_loss_for_distribution),
    unscale_loss_for_distribution=_scale_outside_steps(keras_loss.unscale_loss_for_distribution),
)


@contextlib.contextmanager
def _bind_rows(rows: Rows) -> Iterator[None]:
    before, _thread.rows = _find_rows(), rows
    try:
        with _UNSCALED, weighted_reductions(rows.weight):
            yield
    finally:
        _thread.rows = before


class _Scope(keras.StatelessScope):
    """A scope in which what is not assigned has its value from outside: Keras's regularizers ask for that alone."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._is_asking = False

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if value is None and not self._is_asking:
            self._is_asking = True
            try:
                value = tf.convert_to_tensor(variable.value)
            finally:
                self._is_asking = False
        return value


class Value(NamedTuple):
    """Where a number that a step returns comes from: a result of a metric, in its place; None: from the step itself."""

    metric: keras.metrics.Metric | None
    position: int = 0


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """Results and updates of a model's step, known by tracing it.

    Attributes:
      values: by the names that the step returns.
      shapes: of those that come from the step itself.
      updates: the optimizers whose `apply` it calls, each with the variables of the first call.
      adds_rows: whether it differentiates a loss of each row by weights, which adds up the rows' gradients.
      fixed_shapes: of random numbers that it draws for all rows alike.
    """

    values: Mapping[str, Value]
    shapes: Mapping[str, tuple[int, ...]]
    updates: Sequence[tuple[keras.optimizers.Optimizer, list[keras.Variable]]]
    adds_rows: bool
    fixed_shapes: FixedShapes


def trace_step(model: keras.Model, method: str, structure: Any) -> StepTrace:
    """Traces a step of a model on the shapes of a batch, which builds what is not built. In the strategy's scope.

    Args:
      model: compiled.
      method: "train_step" or "test_step".
      structure: nest of `tf.TensorSpec`s of a batch of examples.

    Raises:
      UserError: the step does not fit the examples, or returns what is no number.
    """
    metrics = list_metrics(model)
    found = _trace(model, method, structure, metrics)
    built = list_metrics(model)
    return found if len(built) == len(metrics) else _trace(model, method, structure, built)


def _trace(model: keras.Model, method: str, structure: Any, metrics: Sequence[keras.metrics.Metric]) -> StepTrace:
    results: dict[int, tuple[Value, Any]] = {}  # by identity, with what has it
    updates: dict[int, tuple[keras.optimizers.Optimizer, list[keras.Variable]]] = {}
    logs: dict[str, Any] = {}
    by_row: list[Any] = []

    def record_result(metric: keras.metrics.Metric, result: Callable[[], Any]) -> Any:
        value = result()
        for position, each in enumerate(tf.nest.flatten(value)):
            if isinstance(each, tf.Tensor | keras.Variable):  # no number, of which there are others like it
                results[id(each)] = Value(metric, position), each
        return value

    def record_update(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not all(each is None for each in grads):
            updates.setdefault(id(self), (self, variables))

    def zero_gradient(self: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        losses, weights = ([tf.TensorShape(each.shape) for each in tf.nest.flatten(nest)] for nest in (target, sources))
        if all(shape.is_fully_defined() for shape in weights):
            by_row.extend(shape for shape in losses if shape.rank and shape[0] is None)
        return tf.nest.map_structure(tf.zeros_like, sources)

    def step(examples: Any) -> tf.Tensor:
        with _Scope():
            logs.update(as_logs(getattr(model, method)(_unwrap(examples))))
        return tf.constant(0)

    with Patches() as patches, explain_errors(structure), record_fixed_shapes() as fixed_shapes:
        for kind in UPDATING:
            patches.replace(kind, apply=record_update)
        patches.replace(tf.GradientTape, gradient=zero_gradient)  # which outside of replicas there is none of
        for metric in metrics:
            patches.replace(metric, result=functools.partial(record_result, metric, metric.result))
        as_tf_function(step).get_concrete_function(structure)
        with keras.StatelessScope():
            pass  # at its end Keras makes the variables that were asked for in the other one
    values = {name: results.get(id(each), (Value(None), None))[0] for name, each in logs.items()}
    shapes = {}
    for name, value in values.items():
        if value.metric is None:
            shape = tf.convert_to_tensor(logs[name]).shape
            if not shape.is_fully_defined():
                raise UserError(
                    f"{type(model).__name__}.{method} returns {name!r} of shape {shape.as_list()}. Return a number, "
                    "the mean over the batch, or the result of a metric."
                )
            shapes[name] = tuple(shape)
    return StepTrace(values, shapes, list(updates.values()), bool(by_row), frozenset(fixed_shapes))


def _unwrap(examples: Any) -> Any:
    """A batch as Keras gives it to a step: x alone where there is nothing else."""
    is_alone = isinstance(examples, tuple) and len(examples) == 1 and not tf.nest.is_nested(examples[0])
    return examples[0] if is_alone else examples


def as_logs(returned: Any) -> dict[str, Any]:
    """Returns a step's results by name; a number alone is the loss, as Keras has it."""
    if returned is None:
        return {}
    return dict(returned) if isinstance(returned, Mapping) else {"loss": returned}


def list_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that `fit` resets, those inside of Keras's own collections in their place."""
    found: list[keras.metrics.Metric] = []
    for each in model.metrics:
        found.extend(getattr(each, "metrics", [each]))
    return list({id(each): each for each in found}.values())


class StepMetrics(MetricGroup):
    """The metrics of a model with steps of its own, and what else a step returns. Make it inside the strategy's scope.

    Args:
      model: built.
      step: whose results are read.
    """

    def __init__(self, model: keras.Model, step: StepTrace) -> None:
        self._reset = list_metrics(model)
        shown = [value.metric for value in step.values.values() if value.metric is not None]
        self._values = keras.metrics.Metric(name="step_values")
        self._last = {
            name: self._values.add_variable(shape=shape, initializer="zeros", name=name.replace("/", "_"))
            for name, shape in step.shapes.items()
        }
        self.step = step
        self.metrics = list({id(each): each for each in [*self._reset, *shown, self._values]}.values())
        self.names = list(step.values)

    def reported_names(self) -> None:
        """Returns None: another step of the model may report other names."""
        return

    def reset(self) -> None:
        for metric in self._reset:
            metric.reset_state()

    def note(self, returned: Any, rows: Rows) -> None:
        """Keeps what a step has returned of its own, and not of metrics, until the next step; in replica context."""
        logs = as_logs(returned)
        for name, variable in self._last.items():
            value = tf.cast(tf.convert_to_tensor(logs[name]), tf.float32)
            variable.assign(value if rows.weight is None else value * rows.weight)

    def results_of(self, states: Mapping[int, tf.Tensor]) -> dict[str, tf.Tensor]:
        results: dict[str, tf.Tensor] = {}
        for name, (metric, position) in self.step.values.items():
            if metric is None:
                results[name] = states[id(self._last[name])]
            else:
                result = result_of(metric, [states[id(variable)] for variable in metric.variables])
                results[name] = tf.nest.flatten(result)[position]
        return results


def average_over_replicas(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    metrics: Sequence[keras.metrics.Metric],
    patches: Patches,
) -> None:
    """Has a model's step compute, in `step_on_rows`, what one device would on the whole batch.

    Args:
      model: built.
      optimizers: that the step calls.
      metrics: that the step updates.
      patches: of the training.
    """
    for optimizer in optimizers:
        disable_reduction(optimizer, patches)
        patches.replace(optimizer, apply=functools.partial(_apply_average, optimizer, optimizer.apply))
    for metric in metrics:
        if "update_state" not in vars(metric):
            patches.replace(metric, update_state=functools.partial(_update_by_rows, metric, metric.update_state))
    for variable in model.variables:
        if variable.aggregation == NONE and "float" in variable.dtype:
            patches.replace(variable, assign=functools.partial(_assign_average, variable.assign))


def _apply_average(
    optimizer: keras.optimizers.Optimizer, apply: Callable[..., None], grads: Any, trainable_variables: Any = None
) -> None:
    rows = _find_rows()
    if rows is None or rows.is_applying:
        apply(grads, trainable_variables)
        return
    sent = [None if each is None else make_dense_if_small(each) for each in grads]
    grads = [sum_repeated_rows(each) for each in rows.average(sent)]
    skips = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)  # a step that overflows
    if not skips and rows.graph is tf.compat.v1.get_default_graph():  # else in a loop or a branch, which nothing leaves
        rows.are_finite.append(are_finite([each for each in grads if each is not None], tf.constant(0.0)))
    rows.is_applying = True
    try:
        apply(grads, trainable_variables)
    finally:
        rows.is_applying = False


def _assign_average(assign: Callable[[Any], Any], value: Any) -> Any:
    rows = _find_rows()
    if rows is None or rows.weight is None or rows.is_applying:
        return assign(value)
    return assign(rows.average([tf.convert_to_tensor(value)])[0])


def _update_by_rows(metric: keras.metrics.Metric, update: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """A number without a weight counts once for all replicas; rows count by their share."""
    rows = _find_rows()
    if rows is None or rows.weight is None:
        return update(*values, **named)
    parameters = [*inspect.signature(update).parameters]
    if "sample_weight" not in parameters:
        return update(*values, **named)
    num_values = parameters.index("sample_weight")
    is_mean = num_values == 1 and isinstance(metric, keras.metrics.Mean | keras.metrics.Sum)
    if len(values) > num_values:
        named["sample_weight"], values = values[num_values], values[:num_values]
    weight = named.get("sample_weight")
    first = tf.convert_to_tensor([*values, *named.values()][0])
    if is_mean and weight is None and not first.shape.rank:
        named["sample_weight"] = rows.weight
    elif rows.share is not None:
        is_mine = round_shares(rows.share) > 0.0
        before = [(variable, tf.identity(variable.value)) for variable in metric.variables]
        update(*values, **named)  # by weights not every metric can leave out rows of another replica
        for variable, value in before:
            variable.assign(tf.where(is_mine, variable.value, value))
        return None
    return update(*values, **named)


def step_on_rows(
    strategy: Strategy,
    model: keras.Model,
    method: str,
    metrics: StepMetrics,
    batch: Mapping[str, Any],
    plan: BatchPlan,
    whole_rows: int | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Runs the model's own `train_step` or `test_step` on one replica's rows; in replica context.

    Args:
      strategy: connected.
      model: with `average_over_replicas`.
      method: "train_step" or "test_step".
      metrics: of the step.
      batch: a local batch.
      plan: how batches come cut.
      whole_rows: of every global batch, cut into parts of one size; None where the sizes differ.

    Returns:
      The rows of the global batch, and whether all gradients are finite.
    """
    examples = batch["examples"]
    share = batch["shares"][0] if "shares" in batch and whole_rows is None else None
    first = next(each for each in tf.nest.flatten(examples) if each is not None)
    own = tf.cast(tf.shape(first)[0], tf.float32)
    own = own if share is None else own * share
    if whole_rows is not None:
        whole = tf.constant(float(whole_rows))
        own = whole / strategy.topology.num_replicas
    else:
        (whole,) = strategy.sum_over_replicas([own])
    rows = Rows(strategy, own, whole, share)
    drawn = find_rows(plan, examples, plan.find_first_row(batch, 0, replica_index()), metrics.step.fixed_shapes)
    with _bind_rows(rows), draw_for_rows(drawn):
        metrics.note(getattr(model, method)(_unwrap(examples)), rows)
    return whole, tf.reduce_all(tf.stack(rows.are_finite)) if rows.are_finite else tf.constant(True)


def refuse_padding(plan: BatchPlan) -> None:
    """Raises UserError where batches are padded: the model's step would take the padding for examples."""
    if plan.pad and plan.num_examples % plan.global_batch_size and not plan.drop_remainder:
        raise UserError(
            f"The model's own step would take the rows that pad the last batch for examples. {plan.num_examples} "
            f"examples are no multiple of global_batch_size = {plan.global_batch_size}. Write train.drop_remainder = "
            "True, or a size that divides them."
        )


def find_whole_rows(plan: BatchPlan, source: Source) -> int | None:
    """The rows of every global batch of a source, cut into parts of one size; None where the sizes may differ."""
    is_known = plan.width is not None and not isinstance(source, StreamSource)  # whose batches are the user's
    return plan.global_batch_size if is_known else None


class OwnTrainStep(TrainStep):
    """`TrainStep` for a model with a `train_step` of its own. It reports no loss but what that step returns.

    Args:
      strategy: connected.
      learner: what is trained.
      plan, whole_rows: as in `step_on_rows`.
    """

    reports_loss = False

    def __init__(self, strategy: Strategy, learner: Learner, plan: BatchPlan, whole_rows: int | None) -> None:
        self._strategy = strategy
        self._learner = learner
        self._plan, self._whole_rows = plan, whole_rows
        self.term_names = ()
        self.unused = []
        self.compiles_update = False
        self.on_batch = self._on_batch
        self.run = as_tf_function(self._run, reduce_retracing=True)
        self.reset_metrics = as_tf_function(lambda: strategy.run(learner.train_metrics.reset))

    def _on_batch(self, batch: Any) -> StepResult:
        strategy, learner, none = self._strategy, self._learner, tf.constant(0.0, tf.float64)
        assert isinstance(learner.train_metrics, StepMetrics)
        step = functools.partial(step_on_rows, strategy, learner.model, "train_step", learner.train_metrics)
        count, finite = strategy.first_local(strategy.run(step, args=(batch, self._plan, self._whole_rows)))
        return StepResult(tf.constant(0.0), {}, count, (), finite, none, tf.constant(math.nan))


LARGEST_DIFFERENCE = 1e-3  # relative, of gradients that rounding alone parts


def compare_halves(model: keras.Model, examples: Any) -> float | None:
    """How much the gradients of a batch differ from the mean of those of its halves, relative to the largest.

    A step whose losses are means over its batch gives about 0. Outside of any strategy; the model stays as it is.

    Args:
      model: compiled, and traced by `trace_step`.
      examples: a batch, of two rows at least.

    Returns:
      None where chance, batch normalization or rounding to 16 bits would make the halves differ anyway.
    """
    is_rounded = any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())
    if is_rounded or seed_generators(model) or any(layer.trainable for layer in batch_norm_layers(model)):
        return None
    kept = [*model.variables, *(variable for metric in list_metrics(model) for variable in metric.variables)]
    before = [keras.ops.convert_to_numpy(variable) for variable in kept]

    def compute(part: Any) -> list[tf.Tensor]:
        found: list[tf.Tensor] = []

        def note(self: Any, grads: Any, trainable_variables: Any = None) -> None:
            found.extend(tf.reshape(tf.convert_to_tensor(each), [-1]) for each in grads if each is not None)

        with Patches() as patches:
            for kind in UPDATING:
                patches.replace(kind, apply=note)
            model.train_step(_unwrap(part))
        return found

    def differentiate(rows: slice) -> np.ndarray:
        part = tf.nest.map_structure(lambda each: each[rows], examples)
        gradients = as_tf_function(compute)(part)
        for variable, value in zip(kept, before, strict=True):
            variable.assign(value)
        return np.concatenate([gradient.numpy() for gradient in gradients])

    count = len(tf.nest.flatten(examples)[0])
    half = count // 2
    whole, again, first, second = map(differentiate, (slice(count), slice(count), slice(half), slice(half, count)))
    if not np.allclose(whole, again):
        return None
    mean = (half * first + (count - half) * second) / count
    return float(np.abs(whole - mean).max() / max(np.abs(whole).max(), 1e-12))
