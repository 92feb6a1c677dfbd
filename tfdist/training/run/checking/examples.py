"""Looks at some examples before a training learns from them: whether the loss on them is a number.

Invariant: nothing is learned and no statistics move; a value that is not finite is refused only where it makes the loss
or its gradient not finite, since a model may know what to do with it. Called before the first step, on examples that
lie in memory, and by `--mode=validate` on the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import user_code
from tfdist.errors import UserError
from tfdist.strategies.base import Strategy
from tfdist.tasks.base import Task
from tfdist.training.step.gradients import forward
from tfdist.training.step.precision import traced

MOST_ROWS = 8
_MOST_BYTES = 16 * 2**20  # read of a file at most


def check_held(model: keras.Model, task: Task, examples: Any, split: str, strategy: Strategy | None = None) -> None:
    """Raises UserError where values that are not finite, among examples in memory, make the loss not finite.

    Args:
      model: built.
      task: gives the loss.
      examples: nest of arrays with one row an example.
      split: what the message calls them, "training" or "evaluation".
      strategy: connected; None computes outside of any.
    """
    rows = _rows_not_finite(examples)
    if rows.size:
        check_rows(model, task, examples, rows, f"{split} data", strategy)


def check_first_batch(model: keras.Model, task: Task, examples: Any, split: str) -> None:
    """Raises UserError where model and loss cannot compute on a batch, or the loss is not finite."""
    arrays = tf.nest.map_structure(np.asarray, examples)
    rows = _rows_not_finite(arrays)
    count = len(tf.nest.flatten(arrays)[0])
    check_rows(model, task, arrays, rows if rows.size else np.arange(count), f"first batch of the {split} data")


def check_rows(
    model: keras.Model, task: Task, examples: Any, rows: np.ndarray, where: str, strategy: Strategy | None = None
) -> None:
    """Computes the loss on some of the rows; raises UserError as the two above say."""
    found = describe_not_finite(examples, rows)
    chosen = tf.nest.map_structure(lambda array: tf.constant(np.asarray(array)[rows[:MOST_ROWS]]), examples)

    num_parts = 1 if strategy is None else strategy.topology.num_replicas
    parts = {"num_parts": num_parts, "batch_size": num_parts * MOST_ROWS}

    def compute(part: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            objective = forward(model, task, {"examples": part}, training=False, **parts)
            loss = tf.add_n([*objective.numerators.values()])
        if not found:
            return loss
        # Activations may take NaN for 0 on the way forward; the gradients of the weights that met it do not.
        gradients = [g for g in tape.gradient(loss, model.trainable_variables) if g is not None]
        values = [loss, *(g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients)]
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
        return tf.where(is_finite, loss, tf.constant(np.nan, loss.dtype))

    try:
        if strategy is None:
            value = traced(compute)(chosen)
        else:
            value = strategy.first_local(traced(lambda p: strategy.run(compute, (p,)))(chosen))
        total = float(value)
    except tf.errors.OpError as error:
        refused = user_code.refused_values(error)
        raise refused or user_code.failed(f"The model or the loss, on the {where},", error) from error
    if np.isfinite(total):
        return
    if found:
        raise UserError(
            f"The {where} holds values that are not finite, and so the loss or its gradient is not: {found}. Mend or "
            "leave out such examples."
        )
    raise UserError(
        f"The loss on the {where} is {total}, though all its values are finite. Look for a logarithm or a division in "
        "the model or the loss that meets 0, and for values that are too large."
    )


def describe_not_finite(examples: Any, rows: np.ndarray) -> str:
    """The first value that is not finite in each array: `x holds nan in example 3`."""
    found = []
    for name, array in named_arrays(examples):
        array = np.asarray(array)
        if array.dtype.kind in "fc":
            bad = [row for row in rows if not np.isfinite(array[row]).all()]
            if bad:
                values = np.ravel(array[bad[0]])
                found.append(f"{name} holds {values[~np.isfinite(values)][0]} in example {bad[0]:,}")
    return ", ".join(found)


def named_arrays(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of a nest of examples with their places in it: x, y, x.upper …"""
    if isinstance(nest, Mapping):
        for name in nest:
            yield from named_arrays(nest[name], f"{path}.{name}".strip("."))
    elif isinstance(nest, tuple | list):
        names = ("x", "y", "sample_weight") if not path and len(nest) <= 3 else map(str, range(len(nest)))
        for name, part in zip(names, nest, strict=False):
            yield from named_arrays(part, f"{path}.{name}".strip("."))
    else:
        yield path or "examples", nest


def _rows_not_finite(examples: Any) -> np.ndarray:
    """Some of the examples that hold NaN or infinity, as row numbers, among the first bytes of each array."""
    found: set[int] = set()
    for _, array in named_arrays(examples):
        most_bytes = _MOST_BYTES if isinstance(array, np.memmap) else 16 * _MOST_BYTES  # which costs some 0.2 s
        array = np.asarray(array)
        if array.dtype.kind not in "fc" or not array.size:
            continue
        row_bytes = array.nbytes // len(array)
        at_once = max(1, _MOST_BYTES // row_bytes)
        for first in range(0, min(len(array), max(1, most_bytes // row_bytes)), at_once):
            part = array[first : first + at_once]
            is_bad = ~np.isfinite(part).reshape(len(part), -1).all(axis=1)
            if is_bad.any():
                found |= {first + int(row) for row in np.flatnonzero(is_bad)[:MOST_ROWS]}
                break
    return np.array(sorted(found), np.int64)
