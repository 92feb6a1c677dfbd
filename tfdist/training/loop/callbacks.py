"""Keras callbacks in a loop that is not Keras's.

Invariant: every worker's callbacks see the same logs, so those that act on the model or the optimizer act alike on
all; those that write files run on the chief alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist import user_code
from tfdist.checkpoint.callback_state import Baseline
from tfdist.checkpoint.policy import OFF, CheckpointPolicy, resolve_policy
from tfdist.errors import TfdistError, UserError, is_whole_number
from tfdist.storage import files
from tfdist.strategies.strategy import Strategy
from tfdist.training.step.optimizer import keeps_average

TRAIN_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_HOOKS = ("on_test_begin", "on_test_end")
TEST_BATCH_HOOKS = ("on_test_batch_begin", "on_test_batch_end")
WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)
BACKUP = "keras.callbacks.BackupAndRestore"
KERAS_FILE = "latest.weights.h5"  # what Keras's callback leaves in its directory


class Callbacks:
    """The user's callbacks, as this worker runs them.

    A callback runs on every worker, unless it is one of Keras's that write, or has an attribute `chief_only = True`.
    BackupAndRestore never runs.

    Attributes:
      act_on_batches: the names of those that want every batch of the training; calls are then one step long.
      act_on_test_batches: whether one wants every batch of an evaluation.
      wrap_tests: whether one does something before an evaluation and after it, such as to swap weights.
      are_any: whether there are any, on whichever worker. All four are the same on every worker.

    Args:
      callbacks: of this worker, which `check_callbacks` let pass; others may have others.
      model: which they act on.
      optimizer: of the training.
      strategy: connected.
      params: what they find in `self.params`.
      compiled: what the model is put into while one of them runs.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        strategy: Strategy,
        params: dict[str, Any],
        compiled: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        callbacks = [c for c in callbacks if not is_backup(c)]
        mine = [c for c in callbacks if strategy.topology.is_chief or not writes(c)]
        self._mine = mine
        self._loggers = [each for each in mine if isinstance(each, keras.callbacks.CSVLogger)]
        self._num_epochs: int = params["epochs"]
        self._resumes_at: int | None = None
        names = list_active_callbacks(callbacks, TRAIN_BATCH_HOOKS)
        acts_on_test = bool(list_active_callbacks(callbacks, TEST_BATCH_HOOKS))
        wraps_tests = any(all(_is_active(c, hook) for hook in TEST_HOOKS) for c in callbacks)
        any_of = strategy.sum_over_workers([len(callbacks), len(names), acts_on_test, wraps_tests])
        self.are_any, acts_on_batches, self.act_on_test_batches, self.wrap_tests = (any_of > 0).tolist()
        self.act_on_batches = names or (["A callback of another worker"] if acts_on_batches else [])
        self._model = model
        self._optimizer = optimizer
        model.stop_training = False
        self._compiled = compiled
        with compiled():
            self._list = keras.callbacks.CallbackList(mine, model=model, add_history=False, add_progbar=False, **params)
        self._has_end_hooks = any(overrides(callback, "on_train_end") for callback in mine)

    @property
    def wants_stop(self) -> bool:
        """Whether a callback of this worker has set `stop_training`."""
        return bool(self._model.stop_training)

    @property
    def wants_evaluation_stop(self) -> bool:
        """Whether a callback of this worker has set `stop_evaluating`."""
        return bool(self._model.stop_evaluating)

    def train_begin(self, resumes_at: int | None = None) -> None:
        """`resumes_at`: the next epoch whose end the callbacks see, of a run that an earlier start began."""
        self._resumes_at = resumes_at
        with continued_files(self._loggers, resumes=resumes_at is not None):
            self.call("on_train_begin")
        self._baseline = Baseline(self._mine)
        for logger in self._loggers if resumes_at is None else ():
            logger.lines_before = len(_read_lines(logger))  # of other runs, which a checkpoint keeps

    def changes(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns what the callbacks have learned since `train_begin`, for JSON, and the arrays that this refers to."""
        return self._baseline.changes()

    def restore(self, changes: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, stops: bool) -> None:
        """Puts back what `changes` gave, after `train_begin`; `stops`: one of them had asked to stop."""
        self._baseline.restore(changes, arrays)
        self._model.stop_training = stops
        ended = stops or (self._resumes_at or 0) >= self._num_epochs
        for logger in () if ended else self._loggers:
            _drop_rows(logger, self._resumes_at or 0)

    def train_end(self, logs: dict[str, Any]) -> bool:
        """Ends training as `fit` does: the optimizer's averages replace the weights, then callbacks may change them.

        Args:
          logs: the last epoch's, as `on_epoch_end` had them.

        Returns:
          Whether the model's weights changed, so that the last evaluation is not theirs.
        """
        may_change = self._has_end_hooks or keeps_average(self._optimizer)
        before = self._digest_weights() if may_change else []
        self._optimizer.finalize_variable_values(self._model.trainable_variables)
        self.call("on_train_end", logs)
        return may_change and before != self._digest_weights()

    def _digest_weights(self) -> list[bytes]:
        """A digest of each weight: a copy of all of them would take the memory of another model."""
        arrays = (np.ascontiguousarray(weight.numpy()) for weight in self._model.weights)
        return [hashlib.blake2b(array.reshape(-1).view(np.uint8).data).digest() for array in arrays]

    @property
    def weights_are_finite(self) -> bool:
        """Whether no weight is infinite or not a number."""
        return all(np.isfinite(w).all() for w in self._model.get_weights() if w.dtype.kind in "fV")

    def allow_evaluation(self) -> None:
        """Clears `stop_evaluating`, which an earlier evaluation, or that of another set, may have left."""
        self._model.stop_evaluating = False

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of all callbacks, with logs as `fit` gives them.

        Raises:
          CallbackError: one has raised something; the message names it.
        """
        given = [_as_in_fit(each) if isinstance(each, dict) else each for each in arguments]
        try:
            with self._compiled():
                getattr(self._list, hook)(*given)
        except TfdistError:
            raise
        except Exception as error:
            told = user_code.build_error(f"The callback {_find_raiser(error)}, in {hook},", error)
            raise CallbackError(str(told)) from error


def _as_in_fit(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The logs with arrays where a metric gives several numbers."""
    return {name: np.asarray(value, np.float32) if isinstance(value, list) else value for name, value in logs.items()}


class CallbackError(UserError):
    """An exception of a callback, in one message; its cause is the exception."""

    error_id = "code-failure"


def _find_raiser(error: Exception) -> str:
    """The name of the callback that an exception came through first."""
    holders = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [h for h in holders if isinstance(h, keras.callbacks.Callback)]
    found = [h for h in found if not isinstance(h, keras.callbacks.CallbackList)]
    return type(found[0]).__name__ if found else "list"


@contextlib.contextmanager
def continued_files(loggers: Sequence[keras.callbacks.CSVLogger], *, resumes: bool) -> Iterator[None]:
    """Has each CSVLogger continue its file where a run resumes."""
    appends = [each.append for each in loggers]
    for each in loggers:
        each.append_header = True  # an earlier call of `fit` may have left it False
        each.append |= resumes
        vars(each).pop("lines_before", None)
    try:
        yield
    finally:
        for each, append in zip(loggers, appends, strict=True):
            each.append = append


def _read_lines(logger: keras.callbacks.CSVLogger) -> list[bytes]:
    path = pathlib.Path(logger.filename)
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _drop_rows(logger: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Takes the run's rows of this and later epochs off the end of its file, and one that a kill cut off."""
    kept = lines = _read_lines(logger)
    while len(kept) > max(1, getattr(logger, "lines_before", 0)):
        number, _, _ = kept[-1].decode().partition(logger.sep)
        if kept[-1].endswith(b"\n") and not (number.isdecimal() and int(number) >= epoch):
            break
        kept = kept[:-1]
    if len(kept) < len(lines):
        os.truncate(logger.filename, sum(map(len, kept)))  # to which it is open already, to append


def writes(callback: keras.callbacks.Callback) -> bool:
    """Whether only the chief should run it."""
    return bool(getattr(callback, "chief_only", isinstance(callback, WRITERS)))


def takes_weights(callback: keras.callbacks.Callback) -> bool:
    """Whether one of Keras's callbacks copies, saves or swaps the model's weights."""
    copying = (keras.callbacks.ModelCheckpoint, keras.callbacks.SwapEMAWeights)
    return isinstance(callback, copying) or bool(getattr(callback, "restore_best_weights", False))


def check_callbacks(callbacks: Any) -> None:
    """Raises UserError where one of them cannot work here."""
    if not isinstance(callbacks, (list, tuple)):
        raise UserError(f"train.callbacks is {callbacks!r}; write a list, [@keras.callbacks.EarlyStopping()].")
    for callback in callbacks:
        if isinstance(callback, type) and issubclass(callback, keras.callbacks.Callback):
            module = "keras.callbacks" if callback.__module__.startswith("keras.") else callback.__module__
            name = callback.__name__
            raise UserError(f"train.callbacks holds the class {name}; write @{module}.{name}() with parentheses.")
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError(f"train.callbacks holds {callback!r}, which is no keras.callbacks.Callback.")
        if isinstance(callback, keras.callbacks.CSVLogger) and files.is_remote(callback.filename):
            raise UserError(
                f"keras.callbacks.CSVLogger cannot write {callback.filename}: it adds to its file, which an object in "
                "a bucket does not allow. Leave it out: metrics.jsonl of the run has the same numbers. Or give a local "
                "path."
            )
    find_backup(callbacks)


def _saves_by_epoch(callback: Any) -> bool:
    return callback.save_freq == "epoch"


def _summarizes_by_epoch(callback: Any) -> bool:
    """Whether TensorBoard writes nothing for a batch; what it profiles it keeps under a private name."""
    return callback.update_freq == "epoch" and not callback.write_steps_per_second and not callback._should_trace


_IDLE: dict[type[keras.callbacks.Callback], Callable[[Any], bool]] = {
    keras.callbacks.ModelCheckpoint: _saves_by_epoch,
    keras.callbacks.OrbaxCheckpoint: _saves_by_epoch,
    keras.callbacks.TensorBoard: _summarizes_by_epoch,
    # The step itself ends a call where the loss is not finite, and the loop then calls the hooks.
    keras.callbacks.TerminateOnNaN: lambda callback: True,
}


def overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Whether a callback has a hook of its own; LambdaCallback has them on the instance."""
    return _function(callback, hook) is not getattr(keras.callbacks.Callback, hook)


def list_active_callbacks(callbacks: Sequence[keras.callbacks.Callback], hooks: Sequence[str]) -> list[str]:
    """The class names of those that do something in one of `hooks`, each once.

    It follows from the classes and settings of all callbacks, those included that only the chief runs, so every worker
    makes calls of the same length.
    """
    names = (type(c).__name__ for c in callbacks if any(_is_active(c, hook) for hook in hooks))
    return list(dict.fromkeys(names))


def _function(callback: keras.callbacks.Callback, hook: str) -> Any:
    method = getattr(callback, hook)
    return getattr(method, "__func__", method)


def _is_active(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Whether a callback does something in a hook: some of Keras's do nothing in theirs under their settings."""
    for kind, is_idle in _IDLE.items():
        if isinstance(callback, kind) and _function(callback, hook) is getattr(kind, hook):
            return not is_idle(callback)
    return overrides(callback, hook)


def is_backup(callback: Any) -> bool:
    """Whether a callback is read as settings of the run's own checkpoints, and does not run.

    It would write files of its own and set the first epoch of `fit`.
    """
    return isinstance(callback, keras.callbacks.BackupAndRestore)


def find_backup(callbacks: Iterable[Any]) -> keras.callbacks.BackupAndRestore | None:
    """The BackupAndRestore among the callbacks; None where there is none.

    Raises:
      UserError: there are several, one is of a class of the user's own, or says what cannot be meant.
    """
    found = [callback for callback in callbacks if is_backup(callback)]
    if not found:
        return None
    if len(found) > 1:
        raise UserError(f"train.callbacks holds {len(found)} {BACKUP}; a run has one. Remove the others.")
    (callback,) = found
    if type(callback) is not keras.callbacks.BackupAndRestore:
        raise UserError(
            f"train.callbacks holds {type(callback).__name__}, a {BACKUP} of your own. tfdist saves by itself and does "
            f"not call it: write {BACKUP}, and what yours does besides in a callback of its own."
        )
    if callback.save_freq != "epoch" and not is_whole_number(callback.save_freq, least=1):
        raise UserError(f"{BACKUP}.save_freq is {callback.save_freq!r}; write 'epoch' or a number of steps.")
    return callback


def policy_of_backup(backup: keras.callbacks.BackupAndRestore, checkpoint: CheckpointPolicy | str) -> CheckpointPolicy:
    """The policy of `train.checkpoint`, with what the callback says; raises UserError where the two differ."""
    if checkpoint == OFF:
        raise UserError(f"train.checkpoint is 'off', and train.callbacks holds {BACKUP}, which saves. Remove one.")
    policy = resolve_policy(checkpoint)
    assert policy is not None
    by_epoch = backup.save_freq == "epoch"
    wanted: dict[str, tuple[str, Any]] = {
        "every_steps": ("save_freq", None if by_epoch else backup.save_freq),
        "every_epochs": ("save_freq", 1 if by_epoch else None),
        "every_seconds": ("save_freq", None),
        "keep_last": ("double_checkpoint", 2 if backup.double_checkpoint else 1),
    }
    if backup.delete_checkpoint:
        wanted |= {"keep_every_steps": ("delete_checkpoint", None), "keep_best": ("delete_checkpoint", None)}
    for name, (argument, value) in wanted.items():
        said = getattr(policy, name)
        if said not in (getattr(CheckpointPolicy, name), value):
            raise UserError(
                f"{policy.NAME}.{name} is {said!r}, and train.callbacks holds {BACKUP} with {argument} = "
                f"{getattr(backup, argument)!r}, which says otherwise. Remove one of the two."
            )
    return dataclasses.replace(policy, **{name: value for name, (_, value) in wanted.items()})
