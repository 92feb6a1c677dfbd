"""What a subclassed model computes in methods of its own, where Keras's trainer would have called them.

`compute_loss` and `compute_metrics` fit sums over replicas; `train_step` and `test_step`, which reduce and update by
themselves, do not and are refused. Invariant: a method that a model overrides is called, or refused. Two private names
of Keras are used here: that by which `compute_loss` finds the loss of `compile`, and that of the function by which
Keras divides losses by the number of replicas. The case `own_methods` of tests/equivalence fails when they change.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from tfdist.errors import UserError
from tfdist.tasks.base import Term
from tfdist.user_code import where_defined

TASK_EXAMPLE = """
    class MyTask(tfdist.tasks.base.Task):
        def inputs(self, examples):
            return examples[0]
        def terms(self, model, examples, *, training):
            x, y = examples
            outputs = model(x, training=training)
            return {"mine": Term(my_loss(y, outputs))}, outputs  # the loss of each example, [n]
"""


def overrides(model: keras.Model, method: str) -> bool:
    """Whether the model's class has another `method` than Keras's."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def refuse_own_steps(model: keras.Model) -> None:
    """Raises UserError where the model has a training or evaluation step of its own."""
    own = [name for name in ("train_step", "test_step") if overrides(model, name)]
    if own:
        method = getattr(type(model), own[0])
        raise UserError(
            f"{type(model).__name__} has a {own[0]} of its own{where_defined(method)}, which differentiates, updates "
            "or averages by itself and so cannot be computed in parts. Take it out; write what it computes as its "
            f"compute_loss and compute_metrics, or as a task, and name it as train.task:\n{TASK_EXAMPLE}"
        )


class OwnLoss:
    """A model's own `compute_loss`.

    One number a batch is taken for the mean over the batch's rows, and weighs as many rows as there are: exact over
    replicas and microbatches where it is such a mean (of losses, weighted or not, and of what layers add). Numbers of
    single examples are taken as "none" reduces them.

    Args:
      model: has it.
      default: (y, y_pred, sample_weight) → what `super().compute_loss` takes for the loss of `compile`.
    """

    def __init__(self, model: keras.Model, default: Callable[[Any, Any, Any], tf.Tensor]) -> None:
        self._model = model
        self._takes_training = "training" in inspect.signature(model.compute_loss).parameters
        model._compile_loss = default

    def term(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Term:
        """The whole loss, what layers add included."""
        given = {"training": training} if self._takes_training else {}
        with _undivided():
            loss = self._model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **given)
        loss = tf.cast(loss, tf.float32)
        if loss.shape.rank == 0:
            return Term(tf.fill([_num_rows(x)], loss), reduction="sum_over_batch_size")
        return Term(loss, reduction="none")


class _Here(threading.local):
    """Whether this thread, of one replica perhaps, is in a model's `compute_loss`."""

    is_computing = False


_here = _Here()
_divided = keras_loss.scale_loss_for_distribution


def _divided_elsewhere(value: Any) -> Any:
    return value if _here.is_computing else _divided(value)


@contextlib.contextmanager
def _undivided() -> Iterator[None]:
    """Keeps Keras from dividing losses by the number of replicas, as it does for a step that sums their gradients."""
    keras_loss.scale_loss_for_distribution = _divided_elsewhere
    _here.is_computing = True
    try:
        yield
    finally:
        _here.is_computing = False


class OwnMetrics(keras.metrics.Metric):
    """A model's own `compute_metrics`, with a state apart from the model's metrics, which train and evaluate alike.

    Its results are those of `model.metrics`, by their names; what the method returns is their names' check only.

    Args:
      model: has it.

    Raises:
      UserError: the model has no metrics, so that there is nothing to add up over replicas.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(name="compute_metrics")
        self._held = _Untracked(model, [v for metric in model.metrics for v in metric.variables])
        if not self._held.variables:
            raise UserError(
                f"{type(model).__name__}.compute_metrics{where_defined(type(model).compute_metrics)} has no metrics to "
                "update. Make them in the model's __init__, self.accuracy = keras.metrics.SparseCategoricalAccuracy(), "
                "so that they can be added up over replicas and batches."
            )
        self._copies = [
            self.add_variable(v.shape, "zeros", dtype=v.dtype, aggregation=v.aggregation, name=f"copy_{i}")
            for i, v in enumerate(self._held.variables)
        ]
        self.reset_state()

    def update_state(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        with self._scope() as scope:
            returned = self._held.model.compute_metrics(x, y, y_pred, sample_weight)
            values = [scope.get_current_value(v) for v in self._held.variables]
            unknown = set(returned or ()) - set(self._results())
        if unknown:
            raise UserError(
                f"{type(self._held.model).__name__}.compute_metrics returns {sorted(unknown)}, which no metric of the "
                f"model is called; its metrics are {sorted(self._results())}. Only these add up over replicas: make "
                "each number a metric with that name."
            )
        for copy, value in zip(self._copies, values, strict=True):
            copy.assign(value)

    def result(self) -> dict[str, Any]:
        with self._scope():
            return self._results()

    def reset_state(self) -> None:
        with keras.StatelessScope() as scope:
            self._held.model.reset_metrics()
            values = [scope.get_current_value(v) for v in self._held.variables]
        for copy, value in zip(self._copies, values, strict=True):
            copy.assign(tf.zeros(copy.shape, copy.dtype) if value is None else value)

    def _scope(self) -> keras.StatelessScope:
        values = [tf.convert_to_tensor(copy.value) for copy in self._copies]
        return keras.StatelessScope(state_mapping=list(zip(self._held.variables, values, strict=True)))

    def _results(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for metric in self._held.model.metrics:
            result = metric.result()
            results |= result if isinstance(result, dict) else {metric.name: result}
        return {n: tf.identity(r.value) if isinstance(r, keras.Variable) else r for n, r in results.items()}


class _Untracked:
    """Keeps Keras from counting the model's variables among the metric's."""

    def __init__(self, model: keras.Model, variables: list[keras.Variable]) -> None:
        self.model = model
        self.variables = variables


def _num_rows(x: Any) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(x)[0])[0]
