"""Methods of a subclassed model's own that Keras's trainer would have called.

`compute_loss` fits sums over replicas; `train_step` and `test_step`, which reduce and update by themselves, and
`compute_metrics`, whose results no other replica knows, do not and are refused. Invariant: a method that a model
overrides is called, or refused. Two private names of Keras are used here: that by which `compute_loss` finds the loss
of `compile`, and that of the function by which Keras divides losses by the number of replicas. The case `own_methods`
of tests/equivalence fails when they change.
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
from tfdist.keras_patches.patches import SharedPatch
from tfdist.tasks.task import Term
from tfdist.user_code import where_defined

TASK_EXAMPLE = """
    class MyTask(tfdist.tasks.task.Task):
        def inputs(self, examples):
            return examples[0]
        def terms(self, model, examples, *, training):
            x, y = examples
            outputs = model(x, training=training)
            return {"mine": Term(my_loss(y, outputs))}, outputs  # the loss of each example, [n]
"""


def overrides(model: keras.Model, method: str) -> bool:
    """True where the model's class has another `method` than Keras's."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def refuse_own_methods(model: keras.Model) -> None:
    """Raises UserError where the model has a training or evaluation step, or a way to its metrics, of its own."""
    own = [name for name in ("train_step", "test_step") if overrides(model, name)]
    if own:
        method = getattr(type(model), own[0])
        raise UserError(
            f"{type(model).__name__} has a {own[0]} of its own{where_defined(method)}, which differentiates, updates "
            "or averages by itself and so cannot be computed in parts. Take it out; write what it computes as its "
            f"compute_loss, or as a task, and name it as train.task:\n{TASK_EXAMPLE}"
        )
    if overrides(model, "compute_metrics"):
        method = type(model).compute_metrics
        raise UserError(
            f"{type(model).__name__} has a compute_metrics of its own{where_defined(method)}, which is not called. "
            "Take it out, and name its metrics in supervised.Supervised.metrics, or in compile(metrics=…)."
        )


class OwnLoss:
    """The loss of a model's own `compute_loss`.

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
        with _without_scaling():
            loss = self._model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **given)
        loss = tf.cast(loss, tf.float32)
        if loss.shape.rank == 0:
            return Term(tf.fill([tf.shape(tf.nest.flatten(x)[0])[0]], loss), reduction="sum_over_batch_size")
        return Term(loss, reduction="none")


_thread = threading.local()  # of one replica perhaps
_scale_loss = keras_loss.scale_loss_for_distribution
_PATCH = SharedPatch(
    keras_loss,
    scale_loss_for_distribution=lambda value: value if getattr(_thread, "keeps_losses", False) else _scale_loss(value),
)


@contextlib.contextmanager
def _without_scaling() -> Iterator[None]:
    """Keeps Keras from dividing losses by the number of replicas, as it does for a step that sums their gradients."""
    with _PATCH:
        _thread.keeps_losses = True
        try:
            yield
        finally:
            _thread.keeps_losses = False
