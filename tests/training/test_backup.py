"""`keras.callbacks.BackupAndRestore` says where, when and how many checkpoints a run keeps, and writes none itself."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import pytest
from checkpoint.checkpoints import Listener
from equivalence.cases import classification
from keras.callbacks import BackupAndRestore
from mistakes import call, each_is_refused
from training.test_resume import BASE, Once, assert_same, fail, memories
from training.trainings import SMALL, STEPS_PER_EPOCH, Trained, run

from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.commands import verbs
from tfdist.errors import InUseError, UserError
from tfdist.storage import lease
from tfdist.strategies.one_device import OneDevice
from tfdist.training.loop.callbacks import check_callbacks
from tfdist.training.recovery.weights import find_by_path
from tfdist.training.run.train_settings import TrainSettings

pytestmark = pytest.mark.slow

STEPS = 4 * STEPS_PER_EPOCH


def fails_at(step: int) -> Once:
    """By the count of the steps of one start."""
    return Once("on_train_batch_end", step, fail)


def backed_up(directory: pathlib.Path, *callbacks: keras.callbacks.Callback, **said: Any) -> Trained:
    """A run in `directory`/run that a BackupAndRestore saves to `directory`/backup."""
    backup = BackupAndRestore(str(directory / "backup"), **said)
    changes = BASE | {"checkpoint": "auto", "callbacks": [*memories(), *callbacks, backup]}
    return run(directory / "run", may_fail=bool(callbacks), **changes)


def steps(directory: pathlib.Path) -> list[int]:
    return [entry.step for entry in list_checkpoints(str(directory)) if entry.manifest is not None]


def test_an_interrupted_run_goes_on_from_there_and_leaves_nothing_at_its_end(
    tmp_path: pathlib.Path, undisturbed: Trained
) -> None:
    for step, newest in ((5, 4), (12, 14)):
        ended = backed_up(tmp_path, fails_at(step), save_freq=2)
        assert ended.error is not None
        assert steps(tmp_path / "backup") == [newest]
    names = {path.name.split("-")[0] for path in (tmp_path / "backup").iterdir()}
    assert names <= {"step", ".lease"}, "Keras's callback has written"
    trained = backed_up(tmp_path, save_freq=2)
    assert [event["step"] for event in trained.events("resumed")] == [4, 14]
    assert_same(trained, undisturbed)
    assert trained.result.checkpoint_step is None
    assert not (tmp_path / "backup").exists() and not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("double", "kept"), [(False, [STEPS]), (True, [STEPS - STEPS_PER_EPOCH, STEPS])])
def test_each_epoch_is_saved_and_one_or_two_checkpoints_stay_until_a_start_that_deletes_them(
    tmp_path: pathlib.Path, double: bool, kept: list[int]
) -> None:
    trained = backed_up(tmp_path, double_checkpoint=double, delete_checkpoint=False)
    assert [event["step"] for event in trained.events("checkpoint_saved")] == [
        epoch * STEPS_PER_EPOCH for epoch in range(1, 5)
    ]
    assert steps(tmp_path / "backup") == kept and trained.result.checkpoint_step == STEPS
    for looked_at in ("run", "backup"):
        assert verbs.run(["checkpoint", "list", str(tmp_path / looked_at), "--verify"]) == 0
        assert find_by_path(str(tmp_path / looked_at), "train.start_from", tell=Listener()).step == STEPS
    again = backed_up(tmp_path, double_checkpoint=double)  # finds what a kill after the end would have left
    assert again.result is None and again.events("already_finished")
    assert not (tmp_path / "backup").exists()


def test_a_paused_run_and_one_that_failed_keep_theirs(tmp_path: pathlib.Path) -> None:
    backup = BackupAndRestore(str(tmp_path / "backup"))
    run(tmp_path / "run", **BASE | {"checkpoint": "auto", "callbacks": [backup], "stop_after_epochs": 2})
    assert steps(tmp_path / "backup") == [2 * STEPS_PER_EPOCH]


def test_a_fast_check_leaves_them_alone_and_a_run_that_is_saved_elsewhere_now_does_not_begin_again(
    tmp_path: pathlib.Path,
) -> None:
    backed_up(tmp_path, fails_at(5), save_freq=2)
    backup = BackupAndRestore(str(tmp_path / "backup"))
    run(tmp_path / "run", **BASE | {"checkpoint": "auto", "callbacks": [backup], "fast_check": True})
    assert steps(tmp_path / "backup") == [4]
    for callbacks in ([], [BackupAndRestore(str(tmp_path / "other"))]):
        with pytest.raises(UserError, match=f"are in {tmp_path}/backup, and this start looks for them in {tmp_path}"):
            run(tmp_path / "run", **BASE | {"checkpoint": "auto", "callbacks": callbacks})


def test_two_runs_do_not_share_a_directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LOCAL_WAIT_SECONDS", 0.0)
    (tmp_path / "backup").mkdir()
    held = lease.acquire(str(tmp_path / "backup"), owner="another training", notify=lambda line: None)
    with pytest.raises(InUseError, match="backup is in use by another training"):
        backed_up(tmp_path)
    held.release()
    lease.acquire(str(tmp_path / "run"), owner="the run directory is free", notify=lambda line: None).release()


def test_the_run_directory_itself_may_hold_them(tmp_path: pathlib.Path, undisturbed: Trained) -> None:
    backup = BackupAndRestore(str(tmp_path))
    assert_same(run(tmp_path, **BASE | {"checkpoint": "auto", "callbacks": [*memories(), backup]}), undisturbed)
    assert not steps(tmp_path) and (tmp_path / "result.json").exists()


def test_what_keras_has_saved_is_not_taken_for_a_checkpoint(tmp_path: pathlib.Path) -> None:
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / "latest.weights.h5").touch()
    with pytest.raises(UserError, match=r"keras.Model.fit, from which tfdist cannot resume. Give another backup_dir"):
        backed_up(tmp_path)


def settings(checkpoint: Any, **said: Any) -> TrainSettings:
    backup = BackupAndRestore("backup", **said)
    given = SMALL | {"task": classification(), "strategy": OneDevice()}
    return TrainSettings(**given | {"callbacks": [backup], "checkpoint": checkpoint})


test_a_policy_that_says_otherwise_is_refused = each_is_refused(
    lambda policy, said: settings(CheckpointPolicy(**policy), **said),
    ({"every_steps": 5}, {}, "every_steps is 5, and .* with save_freq = 'epoch'"),
    ({"every_steps": 5}, {"save_freq": 6}, "every_steps is 5, and .* with save_freq = 6"),
    ({"every_epochs": 2}, {}, "every_epochs is 2, and .* with save_freq = 'epoch'"),
    ({"every_epochs": 1}, {"save_freq": 6}, "every_epochs is 1, and .* with save_freq = 6"),
    ({"every_seconds": 9}, {}, "every_seconds is 9, and .* with save_freq = 'epoch'"),
    ({"keep_last": 2}, {}, "keep_last is 2, and .* with double_checkpoint = False"),
    ({"keep_last": 3}, {"double_checkpoint": True}, "keep_last is 3, and .* with double_checkpoint = True"),
    ({"keep_best": "val_loss"}, {}, "keep_best is 'val_loss', and .* with delete_checkpoint = True"),
    ({"keep_every_steps": 9}, {}, "keep_every_steps is 9, and .* with delete_checkpoint = True"),
)


class Own(BackupAndRestore):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise AssertionError("is never called")


test_what_cannot_be_meant_is_refused = each_is_refused(
    call,
    (lambda: settings("off"), "checkpoint is 'off', and train.callbacks holds keras"),
    (lambda: check_callbacks([BackupAndRestore("a"), BackupAndRestore("b")]), "holds 2 keras.callbacks"),
    (
        lambda: check_callbacks([BackupAndRestore("a", save_freq=False)]),
        "save_freq is False; write 'epoch' or a number",
    ),
    (lambda: check_callbacks([BackupAndRestore("a", save_freq=-3)]), "save_freq is -3; write 'epoch' or a number"),
    (lambda: check_callbacks([Own("a")]), "holds Own, a keras.callbacks.BackupAndRestore of your own"),
)
