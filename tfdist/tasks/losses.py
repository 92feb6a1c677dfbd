"""Keras losses before their own weighting and reduction, which are done over the global batch instead.

Invariant: values, mask and reduction are those that the loss's own `__call__` would use (https://keras.io/api/losses/).
An example weighs what `keras.Model.fit(class_weight=…)` would let it weigh, in the loss of training alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.tasks.keras_names import find_loss, resolve_loss
from tfdist.tasks.task import REDUCTIONS
from tfdist.user_code import where_defined

SPARSE, ONE_HOT = "sparse_categorical_crossentropy", "categorical_crossentropy"
TRACED_ROWS = 1_009  # a prime, which no other axis is likely to have
Loss: TypeAlias = "keras.losses.Loss | Callable[[tf.Tensor, tf.Tensor], tf.Tensor]"


def as_loss(given: Any, where: str) -> keras.losses.Loss | str:
    """The loss, with a function or a name made one; a name that depends on shapes stays a name.

    Raises:
      UserError: it is none of these, or reduces in a way that nobody knows.
    """
    if isinstance(given, str):
        given = find_loss(given, where)
        if isinstance(given, str):
            return given
    if not callable(given) or isinstance(given, type):
        raise UserError(
            f"loss is {given!r} for {where}; write a Keras loss such as @keras.losses.MeanSquaredError(), with "
            "parentheses, its name, 'mean_squared_error', or a function of (y_true, y_pred)."
        )
    if not isinstance(given, keras.losses.Loss):
        loss = resolve_loss(given)
        loss.needs_whole_batch, loss.unwrapped = bool(getattr(given, "needs_whole_batch", False)), given
        return loss
    if type(given).__call__ is not keras.losses.Loss.__call__:
        raise UserError(
            f"The loss for {where} is a {type(given).__name__}, which has a __call__ of its own"
            f"{where_defined(type(given).__call__)}. tfdist takes each example's loss from call(y_true, y_pred), and "
            "weighs and reduces them itself. Write it in call, or give a function of (y_true, y_pred)."
        )
    if given.reduction not in REDUCTIONS:
        raise UserError(f"The loss for {where} has reduction = {given.reduction!r}; write one of {REDUCTIONS[:-1]}.")
    return given


def needs_whole_batch(loss: keras.losses.Loss) -> bool:
    """True where the losses of single examples depend on the others: Circle's, or one with such an attribute."""
    return isinstance(loss, keras.losses.Circle) or bool(getattr(loss, "needs_whole_batch", False))


def compute_losses(
    loss: keras.losses.Loss, y_true: Any, y_pred: Any, given: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """The float32 losses, [n, …] or a scalar, and the mask of those that count; None where all do.

    Args:
      loss: as `as_loss` gives it.
      y_true: targets.
      y_pred: outputs.
      given: the outputs' mask.
    """
    if any(t.dtype == tf.string for t in tf.nest.flatten(y_true)) and type(loss).__module__.startswith("keras."):
        raise UserError(
            f"The labels are text (string), and {loss.name} takes numbers. Give the number of the class, 0, 1, 2, …, "
            "in the data function."
        )
    _check_form(loss, y_true, y_pred)
    y_true, y_pred = tf.nest.map_structure(
        lambda t: t if t.dtype == tf.string else tf.cast(t, loss.dtype), (y_true, y_pred)
    )
    values = loss.call(y_true, y_pred)
    if values.shape.rank != 0 and not _gives_value_per_row(loss, y_true, y_pred, values):
        loss.needs_whole_batch = True
    own = keras_mask(values)
    values = tf.cast(values, tf.float32)
    if given is not None and given.shape.rank > values.shape.rank:
        given = None  # a mask of time steps says nothing of an example's one loss
    if given is not None and own is not None:
        return values, tf.cast(given, tf.bool) & tf.cast(own, tf.bool)
    return values, own if given is None else given


def _gives_value_per_row(loss: keras.losses.Loss, y_true: Any, y_pred: Any, values: tf.Tensor) -> bool:
    """True where the shape of the losses, `values`, shows one or more for each row and none of several rows.

    A batch without a static length does not show it; a trace of the loss on TRACED_ROWS does, but for Keras's own.
    """
    length = values.shape[0] if values.shape.rank else None
    rows = [part.shape[0] for part in tf.nest.flatten((y_true, y_pred)) if part.shape.rank]
    if length is not None:
        return not rows or length in rows
    is_keras = all(str(each.__module__).startswith("keras.") for each in (type(loss), getattr(loss, "fn", loss)))
    if is_keras or None not in rows:
        return is_keras
    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec([TRACED_ROWS, *t.shape[1:]] if t.shape.rank else t.shape, t.dtype), (y_true, y_pred)
    )
    known, key = vars(loss).setdefault("gives_value_per_row", {}), tuple(tf.nest.flatten(specs))
    if key not in known:
        try:
            with keras.StatelessScope(initialize_variables=False):
                traced = tf.function(loss.call, autograph=False).get_concrete_function(*specs)
            shape = traced.structured_outputs.shape.as_list()
        except Exception:  # of a user's function, which takes some numbers of rows alone
            shape = []
        known[key] = shape[:1] == [TRACED_ROWS] and shape.count(TRACED_ROWS) == 1
    return known[key]


def takes_class_numbers(loss: Any) -> bool:
    """True for Keras's sparse categorical crossentropy: an object, the name, or the function."""
    if isinstance(loss, str) and "sparse" in loss.lower():
        loss = keras.losses.get(loss)
    return getattr(loss, "fn", loss) is keras.losses.sparse_categorical_crossentropy


def describe_mismatch(loss: keras.losses.Loss, outputs: np.ndarray) -> str | None:
    """A sentence on outputs that are logits where the loss takes probabilities, or the other way round; else None."""
    function = getattr(loss, "fn", None)
    if function is None or "from_logits" not in inspect.signature(function).parameters:
        return None
    takes_logits = bool(loss.get_config().get("from_logits", False))
    is_binary = "binary" in function.__name__
    in_range = bool(((outputs >= 0) & (outputs <= 1)).all())
    if not takes_logits and not (in_range and (is_binary or _sum_to_one(outputs))):
        activation = "sigmoid" if is_binary else "softmax"
        return (
            f"the outputs are no probabilities, which {function.__name__} takes. Give the loss from_logits=True, or "
            f"the last layer activation='{activation}'."
        )
    if takes_logits and not is_binary and in_range and _sum_to_one(outputs):
        return f"the outputs are probabilities, and {function.__name__} with from_logits=True takes logits."
    return None


def _sum_to_one(rows: np.ndarray) -> bool:
    return rows.shape[-1:] > (1,) and bool(np.allclose(rows.sum(axis=-1), 1.0, atol=1e-2))


def _check_form(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> None:
    """Raises UserError where classes come as numbers and the loss takes them one-hot, or the other way round."""
    if tf.nest.is_nested(y_true) or tf.nest.is_nested(y_pred):
        return
    shapes = [tf.TensorShape(each.shape) for each in (y_true, y_pred)]
    if any(shape.rank is None for shape in shapes):
        return
    targets, outputs = (shape.as_list() for shape in shapes)
    num_classes = outputs[-1] if outputs else None
    if num_classes in (None, 1):
        return
    if takes_class_numbers(loss) and len(targets) == len(outputs) and targets[-1] == num_classes:
        raise UserError(
            f"The targets are one-hot, {num_classes} numbers an example, and {SPARSE} takes the number of the class. "
            f"Write {ONE_HOT!r} as the loss, or give np.argmax(y, axis=-1)."
        )
    is_one_hot = getattr(loss, "fn", None) is keras.losses.categorical_crossentropy
    if is_one_hot and (len(targets) == len(outputs) - 1 or targets[-1:] == [1]):
        raise UserError(
            f"The targets are class numbers, and {ONE_HOT} takes one-hot ones, {num_classes} numbers an example. Write "
            f"{SPARSE!r} as the loss, or give keras.utils.to_categorical(y, {num_classes})."
        )


def keras_mask(tensor: Any, values: tf.Tensor | None = None) -> tf.Tensor | None:
    """The mask that a layer or a loss left on what it returned; None if it has more axes than `values`."""
    mask = getattr(tensor, "_keras_mask", None)
    return None if mask is None or (values is not None and mask.shape.rank > values.shape.rank) else mask


def check_class_weight(given: Any) -> dict[int, float] | None:
    """Raises UserError where `given` is no {class: weight}, with whole numbers from 0 on for classes."""
    if given is None:
        return None
    whole, number = (int, np.integer), (int, np.integer, float, np.floating)
    if (
        not isinstance(given, Mapping)
        or not given
        or not all(isinstance(c, whole) and c >= 0 and isinstance(w, number) and w >= 0 for c, w in given.items())
    ):
        raise UserError(
            f"class_weight is {given!r}; write a dict of weights by class number, {{0: 1.0, 1: 20.0}}. A class without "
            "one weighs 1."
        )
    return {int(c): float(w) for c, w in given.items()}


def weigh_classes(labels: Any, class_weight: Mapping[int, float]) -> tf.Tensor:
    """float32 [n], the weight of each example, or [n, positions] of each position.

    Args:
      labels: [n], [n, 1] or [n, positions, 1] class numbers, or [n, classes] or [n, positions, classes] of which the
        largest counts.
      class_weight: weights by class number.

    Raises:
      UserError: the labels are no tensor with such axes.
    """
    if not tf.is_tensor(labels) or not labels.shape.rank:
        raise UserError("class_weight is for one output whose targets are of shape [n], [n, 1] or [n, classes].")
    if labels.shape.rank > 1:
        labels = tf.squeeze(labels, -1) if labels.shape[-1] == 1 else tf.argmax(labels, axis=-1)
    if labels.dtype.is_floating:
        labels = tf.round(labels)
    is_class = tf.cast(labels, tf.int64)[..., tf.newaxis] == tf.constant(list(class_weight), tf.int64)
    weights = tf.reduce_sum(tf.where(is_class, tf.constant(list(class_weight.values()), tf.float32), 0.0), axis=-1)
    return tf.where(tf.reduce_any(is_class, axis=-1), weights, 1.0)


def check_one_class(loss: Any, labels: Any) -> None:
    """Raises UserError where the targets of a loss hold a class for each of several positions of an example.

    Args:
      loss: a Keras loss, a function or a name.
      labels: a tensor or its `TensorSpec`.
    """
    shape = getattr(labels, "shape", tf.TensorShape(None))
    if takes_class_numbers(loss) and shape.rank == 2 and shape[-1] != 1:
        raise UserError(
            f"class_weight weighs each example by its one class, and the targets, of shape {list(shape)}, hold a class "
            "for each position. Leave it out, and give a sample_weight of that shape."
        )
