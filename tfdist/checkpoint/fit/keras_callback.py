"""`tfdist.BackupAndRestore`: checkpoints for `keras.Model.fit`, in place of `keras.callbacks.BackupAndRestore`.

Invariant: a `fit` that was killed at any moment and is called again continues with the next batch of the newest
checkpoint, with variables, metrics and callbacks as they were. Scripts import it from `tfdist`; runs of tfdist.main do
not need it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras

from tfdist.checkpoint.fit.fit_session import FitSession, Settings
from tfdist.errors import is_whole_number


class BackupAndRestore(keras.callbacks.Callback):
    """Backs up the state of a `fit`, and restores it when `fit` is called again after an interruption.

    A checkpoint holds the model, the optimizer, the metrics of the epoch so far, the place in the data, and what the
    other callbacks counted and collected; it stalls the training for one copy in memory, is written by a thread, exists
    whole or not at all, and is verified before it is used. With data that come in the same order in each process
    (arrays after `keras.utils.set_random_seed`, or a `tf.data.Dataset`, also one that shuffles with a seed), a run that
    was killed ends with bit-identical weights. On SIGTERM and SIGUSR1 `fit` saves before the next batch, be it of
    training or evaluation, and the process ends with status 143.

    Args:
      backup_dir: a local directory or gs://…, for the checkpoints of one `fit` alone.
      save_freq: "epoch", or a number of batches; False saves on signals only.
      double_checkpoint: keep the last two checkpoints, in case that the newest is damaged.
      delete_checkpoint: remove `backup_dir` when `fit` has ended.

    Example:

        model.fit(x, y, epochs=10, callbacks=[tfdist.BackupAndRestore("checkpoints", save_freq=100)])

    Raises:
      ValueError: an argument is wrong; the model has no variables yet when `fit` begins.
      UserError: the checkpoint is of another model; in `fit`.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        if not backup_dir:
            raise ValueError(f"`backup_dir` must be a directory. Received: backup_dir={backup_dir!r}")
        if save_freq != "epoch" and save_freq is not False and not is_whole_number(save_freq):
            raise ValueError(
                f"`save_freq` must be 'epoch', a number of batches, or False. Received: save_freq={save_freq!r}"
            )
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self._session: FitSession | None = None

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._session is not None:  # its `fit` raised
            self._session.abandon()
        if not self.model.built:
            raise ValueError(
                f"The model {self.model.name!r} is not built, so there is nothing yet to restore a checkpoint into. "
                "Call it on a batch of data, or give it an Input, before `fit`."
            )
        self._session = FitSession(
            self, Settings(self.backup_dir, self.save_freq, self.double_checkpoint, self.delete_checkpoint)
        )
        self._session.begin()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._session is not None:
            self._session.epoch_ends(epoch, logs or {})

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._session is not None:
            self._session.end()
            self._session = None
