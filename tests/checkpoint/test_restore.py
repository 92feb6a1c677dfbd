"""What is restored when several could be, and how a misfit between checkpoint and program is told."""

from __future__ import annotations

import datetime
import pathlib
import signal

import keras
import numpy as np
import pytest
from checkpoint.checkpoints import Listener, assert_same, save_state, save_steps, state_of

from tfdist.checkpoint import restore
from tfdist.checkpoint.callback_state import Baseline
from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.checkpoint.restore import State
from tfdist.errors import UserError

TENSORS = {"kernel": np.zeros((2, 3), np.float32), "bias": np.zeros(3, np.float32), "old": np.zeros(4, np.int64)}


def test_without_checkpoints_there_is_nothing_to_restore(tmp_path: pathlib.Path) -> None:
    assert restore.load_newest(str(tmp_path / "missing"), tell=Listener()) is None
    (tmp_path / "step-000000000001-0123456789ab").mkdir()
    listener = Listener()
    assert restore.load_newest(str(tmp_path), tell=listener) is None
    assert listener.told == []


def test_of_two_checkpoints_of_a_step_the_later_is_restored_and_the_other_in_need(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, 1)
    (first,) = list_checkpoints(str(tmp_path))
    aside = tmp_path / "aside"
    pathlib.Path(first.path).rename(aside)
    save_steps(tmp_path, 1)
    (second,) = list_checkpoints(str(tmp_path))
    aside.rename(first.path)
    assert restore.load_newest(str(tmp_path), tell=Listener()).manifest == second.manifest
    (pathlib.Path(second.path) / "manifest.json").write_text("{}")
    assert restore.load_newest(str(tmp_path), tell=Listener()).manifest == first.manifest


def test_a_path_that_is_no_checkpoint_is_the_users_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="is not a checkpoint: its name must look like"):
        restore.load(str(tmp_path))
    with pytest.raises(UserError, match="never finished"):
        restore.load(str(tmp_path / "step-000000000001-0123456789ab"))


def test_every_difference_is_in_one_message() -> None:
    wanted = {"kernel": ((3, 3), "float32"), "bias": ((3,), "bfloat16"), "odd": ((4,), "int64")}
    with pytest.raises(UserError) as refusal:
        restore.match_tensors(TENSORS, wanted, partial=False)
    assert str(refusal.value).splitlines() == [
        "The checkpoint does not fit this program (4 differences):",
        "  kernel: float32[2, 3] in the checkpoint, float32[3, 3] here",
        "  bias: float32[3] in the checkpoint, bfloat16[3] here",
        "  odd int64[4]: not in the checkpoint. Did you mean 'old'?",
        "  old int64[4]: only in the checkpoint",
        "Train with the configuration that made it, or write train.accept_changes = True to load what fits.",
    ]


@pytest.mark.slow
def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, 1, 2)
    second = pathlib.Path(list_checkpoints(str(tmp_path))[1].path)
    second.rename(tmp_path / "step-000000000009-0123456789ab")
    listener = Listener()
    assert_same(restore.load_newest(str(tmp_path), tell=listener), state_of(1))
    assert "manifest.json is of step 2" in listener.warnings[0]


@pytest.mark.parametrize("place", ["local", "bucket"])
def test_a_part_of_a_checkpoint_is_read(tmp_path: pathlib.Path, place: str, request: pytest.FixtureRequest) -> None:
    if place == "bucket":
        request.getfixturevalue("gcs")
    directory = str(tmp_path) if place == "local" else "gs://bucket/checkpoints"
    tensors = {f"slot-{index}": np.arange(50_000.0) * index for index in range(5)}
    save_state(directory, State(1, tensors, {}), max_file_bytes=2**28)
    wanted = {"slot-1", "slot-2", "slot-4"}
    found = restore.load(list_checkpoints(directory)[0].path, wanted=wanted.__contains__)
    assert found.tensors.keys() == wanted
    for name, array in found.tensors.items():
        np.testing.assert_array_equal(array, tensors[name])
        assert not array.flags.writeable


@pytest.mark.parametrize("value", [signal.SIGINT, datetime.timedelta(1), pathlib.Path("a")], ids=repr)
def test_a_warning_names_an_attribute_that_cannot_be_saved(value: object, caplog: pytest.LogCaptureFixture) -> None:
    callback = keras.callbacks.Callback()
    baseline = Baseline([callback])
    callback.latest = value
    baseline.changes()
    assert "latest" in caplog.text


@pytest.mark.slow
def test_state_comes_back_and_a_method_cannot_be_replaced() -> None:
    callback = keras.callbacks.EarlyStopping()
    callback.on_train_begin()
    baseline = Baseline([callback])
    baseline.restore({"EarlyStopping.0": {"wait": 3, "best": 0.5}}, {})
    assert (callback.wait, callback.best) == (3, 0.5)
    for attribute in ("on_epoch_end", "__class__", "_model", "a b"):
        with pytest.raises(DamagedCheckpoint, match="which is no state of it"):
            baseline.restore({"EarlyStopping.0": {attribute: 1}}, {})
