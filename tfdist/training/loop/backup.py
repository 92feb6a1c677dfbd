"""`keras.callbacks.BackupAndRestore`, read as settings of a run's own checkpoints.

Invariant: Keras's callback itself never runs, as it writes files of its own and sets the first epoch of `fit`. What
`train.checkpoint` says beside it agrees with it, or is a UserError. `TrainSettings` and `Callbacks` ask here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import keras

from tfdist.checkpoint.policy import OFF, CheckpointPolicy, policy_of
from tfdist.errors import UserError, is_whole_number

NAME = "keras.callbacks.BackupAndRestore"
KERAS_FILE = "latest.weights.h5"  # what Keras's callback leaves in its directory


@dataclasses.dataclass(frozen=True)
class Backup:
    """The arguments of a BackupAndRestore.

    Attributes:
      directory: of the checkpoints, local or gs://.
      save_freq: 'epoch', or steps from one checkpoint to the next.
      double_checkpoint: whether the last two stay.
      delete_checkpoint: whether they go when the training has finished.
    """

    directory: str
    save_freq: str | int
    double_checkpoint: bool
    delete_checkpoint: bool

    def policy(self, checkpoint: CheckpointPolicy | str) -> CheckpointPolicy:
        """The policy of `train.checkpoint`, with what the callback says; raises UserError where the two differ."""
        if checkpoint == OFF:
            raise UserError(f"train.checkpoint is 'off', and train.callbacks holds {NAME}, which saves. Remove one.")
        policy = policy_of(checkpoint)
        assert policy is not None
        by_epoch = self.save_freq == "epoch"
        wanted: dict[str, tuple[str, Any]] = {
            "every_steps": ("save_freq", None if by_epoch else self.save_freq),
            "every_epochs": ("save_freq", 1 if by_epoch else None),
            "every_seconds": ("save_freq", None),
            "keep_last": ("double_checkpoint", 2 if self.double_checkpoint else 1),
        }
        if self.delete_checkpoint:
            wanted |= {"keep_every_steps": ("delete_checkpoint", None), "keep_best": ("delete_checkpoint", None)}
        for name, (argument, value) in wanted.items():
            said = getattr(policy, name)
            if said not in (getattr(CheckpointPolicy, name), value):
                raise UserError(
                    f"{policy.NAME}.{name} is {said!r}, and train.callbacks holds {NAME} with {argument} = "
                    f"{getattr(self, argument)!r}, which says otherwise. Remove one of the two."
                )
        return dataclasses.replace(policy, **{name: value for name, (_, value) in wanted.items()})


def is_backup(callback: Any) -> bool:
    """Whether a callback is read as settings and does not run."""
    return isinstance(callback, keras.callbacks.BackupAndRestore)


def find_backup(callbacks: Iterable[Any]) -> Backup | None:
    """What the BackupAndRestore among the callbacks says; None where there is none.

    Raises:
      UserError: there are several, one is of a class of the user's own, or says what cannot be meant.
    """
    found = [callback for callback in callbacks if is_backup(callback)]
    if not found:
        return None
    if len(found) > 1:
        raise UserError(f"train.callbacks holds {len(found)} {NAME}; a run has one. Remove the others.")
    (callback,) = found
    if type(callback) is not keras.callbacks.BackupAndRestore:
        raise UserError(
            f"train.callbacks holds {type(callback).__name__}, a {NAME} of your own. tfdist saves by itself and does "
            f"not call it: write {NAME}, and what yours does besides in a callback of its own."
        )
    if callback.save_freq != "epoch" and not is_whole_number(callback.save_freq, least=1):
        raise UserError(f"{NAME}.save_freq is {callback.save_freq!r}; write 'epoch' or a number of steps.")
    return Backup(
        os.fspath(callback.backup_dir),
        callback.save_freq,
        bool(callback.double_checkpoint),
        bool(callback.delete_checkpoint),
    )
