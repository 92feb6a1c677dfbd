"""Keras callbacks in a loop that is not Keras's.

Invariant: every worker's callbacks see the same logs, so those that act on the model or the optimizer act alike on
all; those that write files run on the chief alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist import user_code
from tfdist.backup.callback_state import Baseline
from tfdist.errors import TfdistError, UserError
from tfdist.storage import files

WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)
BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class Callbacks:
    """The user's callbacks, as this worker runs them.

    A callback runs on every worker, unless it is one of Keras's that write, or has an attribute `chief_only = True`.
    Batch hooks are called once a call of the step function, as Keras does with `steps_per_execution`.

    Raises:
      UserError: an entry is no Keras callback, or one that cannot work here.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        is_chief: bool,
        params: dict[str, Any],
    ) -> None:
        check_callbacks(callbacks)
        mine = [c for c in callbacks if is_chief or not writes(c)]
        self._mine = mine
        self._model = model
        model.optimizer = optimizer  # where Keras callbacks look for the learning rate
        model.stop_training = False
        hooks = keras.callbacks.CallbackList(mine, model=model, add_history=False, add_progbar=False, **params)
        self._list = _Explaining(hooks)
        self._has_batch_hooks = _overridden(mine, BATCH_HOOKS)
        self._has_end_hooks = _overridden(mine, ("on_train_end",))

    @property
    def wants_stop(self) -> bool:
        return bool(self._model.stop_training)

    def train_begin(self) -> None:
        self._list.on_train_begin()
        self._baseline = Baseline(self._mine)

    def changes(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What the callbacks have come to know since `train_begin`, for JSON, and the arrays that it refers to."""
        return self._baseline.changes()

    def restore(self, changes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Puts back what `changes` gave, after `train_begin`."""
        self._baseline.restore(changes, arrays)

    def train_end(self, logs: dict[str, Any]) -> bool:
        """Returns whether a callback changed the model's weights, so that the last evaluation is not theirs."""
        if not self._has_end_hooks:
            return False
        before = self._model.get_weights()
        self._list.on_train_end(logs)
        return any(not np.array_equal(old, new) for old, new in zip(before, self._model.get_weights(), strict=True))

    def epoch_begin(self, epoch: int) -> None:
        self._list.on_epoch_begin(epoch)

    def epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """`logs`: the epoch's training metrics, and the evaluation's under `val_…` names."""
        self._list.on_epoch_end(epoch, logs)

    def batch_begin(self, step_in_epoch: int) -> None:
        if self._has_batch_hooks:
            self._list.on_train_batch_begin(step_in_epoch)

    def batch_end(self, step_in_epoch: int, logs: dict[str, Any]) -> None:
        if self._has_batch_hooks:
            self._list.on_train_batch_end(step_in_epoch, logs)

    def test_begin(self) -> None:
        self._list.on_test_begin()

    def test_end(self, logs: dict[str, Any]) -> None:
        self._list.on_test_end(logs)


class CallbackError(UserError):
    """What a callback raised, in one message; its cause is what was raised."""


class _Explaining:
    """The hooks of a CallbackList, with what they raise turned into a message that names the callback."""

    def __init__(self, hooks: keras.callbacks.CallbackList) -> None:
        self._hooks = hooks

    def __getattr__(self, name: str) -> Callable[..., None]:
        hook = getattr(self._hooks, name)

        def call(*args: Any) -> None:
            try:
                hook(*args)
            except TfdistError:
                raise
            except Exception as error:
                told = user_code.failed(f"The callback {_raising(error)}, in {name},", error)
                raise CallbackError(str(told)) from error

        return call


def _raising(error: Exception) -> str:
    """The name of the callback that an exception came through first."""
    holders = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [h for h in holders if isinstance(h, keras.callbacks.Callback)]
    found = [h for h in found if not isinstance(h, keras.callbacks.CallbackList)]
    return type(found[0]).__name__ if found else "list"


def writes(callback: keras.callbacks.Callback) -> bool:
    """Whether only the chief should run it."""
    return bool(getattr(callback, "chief_only", isinstance(callback, WRITERS)))


def _overridden(callbacks: Sequence[keras.callbacks.Callback], hooks: Sequence[str]) -> bool:
    """Whether one of them has a hook of its own; LambdaCallback has them on the instance."""

    def is_own(callback: keras.callbacks.Callback, hook: str) -> bool:
        method = getattr(callback, hook)
        return getattr(method, "__func__", method) is not getattr(keras.callbacks.Callback, hook)

    return any(is_own(callback, hook) for callback in callbacks for hook in hooks)


def check_callbacks(callbacks: Any) -> None:
    """Raises UserError where one of them cannot work here."""
    if not isinstance(callbacks, (list, tuple)):
        raise UserError(f"train.callbacks is {callbacks!r}; write a list, [@keras.callbacks.EarlyStopping()].")
    for callback in callbacks:
        _check(callback)


def _check(callback: Any) -> None:
    if isinstance(callback, type) and issubclass(callback, keras.callbacks.Callback):
        raise UserError(
            f"train.callbacks holds the class {callback.__name__}; write @keras.callbacks.{callback.__name__}() with "
            "parentheses."
        )
    if not isinstance(callback, keras.callbacks.Callback):
        raise UserError(f"train.callbacks holds {callback!r}, which is no keras.callbacks.Callback.")
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise UserError("keras.callbacks.BackupAndRestore works only inside keras.Model.fit; leave it out here.")
    if isinstance(callback, keras.callbacks.CSVLogger) and files.is_remote(callback.filename):
        raise UserError(
            f"keras.callbacks.CSVLogger cannot write {callback.filename}: it adds to its file, which an object in a "
            "bucket does not allow. Leave it out: metrics.jsonl of the run has the same numbers. Or give a local path."
        )
