"""Methods of a subclassed model's own that Keras's trainer would have called.

A model with a `train_step`, `test_step` or `compute_metrics` of its own is trained and evaluated by its steps, see
training/step/own_step.py. Of a `compute_loss` alone a task makes a term, which fits sums over replicas and
microbatches. Invariant: a method that a model overrides is called, or refused. Two private names of Keras are used
here: that by which `compute_loss` finds the loss of `compile`, and those of the functions by which Keras divides losses
by the number of replicas. The case `own_methods` of tests/equivalence fails when they change.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from tfdist.errors import UserError
from tfdist.keras_patches.patches import SharedPatch
from tfdist.tasks.task import Task, Term
from tfdist.user_code import where_defined

STEPS = ("train_step", "test_step", "compute_metrics")


def overrides(model: keras.Model, method: str) -> bool:
    """True where the model's class has another `method` than Keras's."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def has_own_steps(model: keras.Model) -> bool:
    """Whether the model's class says by itself how it is trained, evaluated or measured."""
    return any(overrides(model, method) for method in STEPS)


def refuse_own_steps(model: keras.Model) -> None:
    """Raises UserError where a task is to train a model that says by itself how it is trained."""
    for method in STEPS:
        if overrides(model, method):
            where = where_defined(getattr(type(model), method))
            raise UserError(
                f"{type(model).__name__} has a {method} of its own{where}, which train.task would not call. Leave "
                "train.task and train.optimizer out, and compile the model. Or take the method out."
            )


class OwnSteps(Task):
    """Stand-in for a task, of a model with steps of its own."""

    def inputs(self, examples: Any) -> Any:
        """x of (x, y, sample_weight)."""
        return keras.utils.unpack_x_y_sample_weight(examples)[0]

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> NoReturn:
        raise AssertionError("The model's own steps compute its losses.")


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
        with unscaled_losses():
            loss = self._model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **given)
        loss = tf.cast(loss, tf.float32)
        if loss.shape.rank == 0:
            return Term(tf.fill([tf.shape(tf.nest.flatten(x)[0])[0]], loss), reduction="sum_over_batch_size")
        return Term(loss, reduction="none")


_thread = threading.local()  # of one replica perhaps


def _disable_by_thread(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: value if getattr(_thread, "keeps_losses", False) else scale(value)


_PATCH = SharedPatch(
    keras_loss,
    scale_loss_for_distribution=_disable_by_thread(keras_loss.scale_loss_for_distribution),
    unscale_loss_for_distribution=_disable_by_thread(keras_loss.unscale_loss_for_distribution),
)


@contextlib.contextmanager
def unscaled_losses() -> Iterator[None]:
    """Keeps Keras from dividing losses by the number of replicas, as it does for a step that sums their gradients."""
    with _PATCH:
        _thread.keeps_losses = True
        try:
            yield
        finally:
            _thread.keeps_losses = False
