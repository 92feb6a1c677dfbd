"""Whether Keras's callbacks will find what they watch, and may change what they change.

Invariant: a training that begins has a metric for each monitor; where a callback of the user's own runs before, which
may add to the logs, that cannot be known and is not judged. Called before the first step and by `--mode=validate`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import keras

from tfdist.errors import UserError
from tfdist.training.loop.reported_metrics import Reported

_SETTERS = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)


def check_monitors(
    callbacks: Sequence[keras.callbacks.Callback], reported: Reported, optimizer: keras.optimizers.Optimizer
) -> None:
    """Raises UserError where a callback watches what is not reported, or sets a learning rate that a schedule gives.

    Args:
      callbacks: `train.callbacks`.
      reported: by the training, without what callbacks add.
      optimizer: built.
    """
    for callback in callbacks:
        if not _is_keras(callback):
            reported = dataclasses.replace(reported, names=None)
        _check_rate(callback, optimizer)
        reported.check(f"{type(callback).__name__} monitors", _monitor(callback))


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
