"""Whether Keras's callbacks will find what they watch, and may change what they change.

Invariant: a training that begins has a metric for each monitor; where a callback of the user's own runs before, which
may add to the logs, that cannot be known and is not judged. Called before the first step and by `--mode=validate`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import keras

from tfdist.errors import UserError, suggest
from tfdist.tasks.base import Task
from tfdist.training.metrics import MetricGroup

VALIDATION = "val_"
_SETTERS = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)


def check_monitors(
    callbacks: Sequence[keras.callbacks.Callback],
    *,
    metrics: MetricGroup,
    task: Task,
    optimizer: keras.optimizers.Optimizer,
    evaluates: bool,
) -> None:
    """Raises UserError where a callback watches what is not reported, or sets a learning rate that a schedule gives.

    Args:
      callbacks: `train.callbacks`.
      metrics: of the training, built.
      task: names the loss's terms.
      optimizer: built.
      evaluates: whether there is evaluation data.
    """
    names = metrics.reported_names()
    own = None if names is None else ["loss", *(f"{term}_loss" for term in task.term_names()), *names]
    for callback in callbacks:
        if not _is_keras(callback):
            own = None
        _check_rate(callback, optimizer)
        monitor = _monitor(callback)
        if monitor is not None:
            _check_monitor(type(callback).__name__, monitor, own, evaluates=evaluates)


def _check_monitor(name: str, monitor: str, own: Sequence[str] | None, *, evaluates: bool) -> None:
    if monitor.startswith(VALIDATION) and not evaluates:
        raise UserError(
            f"{name} monitors {monitor!r}, and nothing is evaluated. Write train.eval_data, or a monitor of the "
            f"training, such as {name}.monitor = 'loss'."
        )
    if own is None:
        return
    known = [*own, *(f"{VALIDATION}{metric}" for metric in own)] if evaluates else list(own)
    if monitor not in known:
        raise UserError(
            f"{name} monitors {monitor!r}, which this training does not report.{suggest(monitor, known)} It reports "
            f"{', '.join(known)}."
        )


def _check_rate(callback: keras.callbacks.Callback, optimizer: keras.optimizers.Optimizer) -> None:
    if isinstance(callback, _SETTERS) and has_schedule(optimizer):
        raise UserError(
            f"{type(callback).__name__} sets the learning rate, which a schedule of {type(optimizer).__name__} gives "
            "already. Leave one of them out: write a number for learning_rate, or remove the callback."
        )


def has_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer's learning rate comes from a schedule; then no callback can set it."""
    return isinstance(getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule)


def _monitor(callback: keras.callbacks.Callback) -> str | None:
    """The metric that one of Keras's callbacks watches; None where it watches none."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and not callback.save_best_only:
        return None
    monitor = getattr(callback, "monitor", None)
    watches = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)
    return monitor if isinstance(callback, watches) and isinstance(monitor, str) else None


def _is_keras(callback: keras.callbacks.Callback) -> bool:
    return re.match(r"keras\.", type(callback).__module__) is not None
