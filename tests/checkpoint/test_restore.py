"""What is restored when several could be, and how a misfit between checkpoint and program is told."""

from __future__ import annotations

import datetime
import pathlib
import signal

import keras
import numpy as np
import pytest
import support
from checkpoint.checkpoints import Listener, assert_same, new_manager, save_state, save_steps, state_of

from tfdist.checkpoint import restore
from tfdist.checkpoint.callback_state import Baseline
from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.checkpoint.restore import State
from tfdist.commands import checkpoint as command
from tfdist.commands import verbs
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


def test_a_part_of_a_checkpoint_is_read(root: str) -> None:
    tensors = {f"slot-{index}": np.arange(50_000.0) * index for index in range(5)}
    save_state(root, State(1, tensors, {}), max_file_bytes=2**28)
    wanted = {"slot-1", "slot-2", "slot-4"}
    found = restore.load(list_checkpoints(root)[0].path, wanted=wanted.__contains__)
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


# The command


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run with checkpoints of the steps 10, 20, 30 and 40, the best of which is 20."""
    run = tmp_path / "run"
    run.mkdir()
    manager = new_manager(run / "checkpoints", keep_last=9, on_error="stop")
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.7), (40, 0.6)):
        manager.save(state_of(step), metrics={"acc": accuracy})
        manager.wait()
    manager.close()
    return run


def damage(run_dir: pathlib.Path, step: int) -> pathlib.Path:
    (path,) = (run_dir / "checkpoints").glob(f"step-*{step}-*")
    file = max(path.glob("data-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def test_list_shows_the_newest_first(run_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.run(["checkpoint", "list", str(run_dir)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "created", "size", "files", "metrics"]
    assert [line.split()[0] for line in lines] == ["40", "30", "20", "10"]
    assert lines[2].endswith("acc=0.9")
    assert verbs.run(["checkpoint", "list", str(run_dir / "checkpoints")]) == 0  # which may be given itself
    assert capsys.readouterr().out.splitlines() == [header, *lines]


def test_a_strangers_checkpoint_gives_the_terminal_no_orders(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2Ja"
    manager = new_manager(tmp_path / "checkpoints")
    manager.save(State(1, {evil: np.zeros(3)}, {evil: {evil: evil}}), metrics={evil: 1.0})
    manager.close()
    assert verbs.run(["checkpoint", "list", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err and "\\x1b[2Ja" in shown.out


def test_list_tells_unfinished_and_damaged_ones(run_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (unfinished,) = (run_dir / "checkpoints").glob("step-*40-*")
    (unfinished / "manifest.json").unlink()
    damage(run_dir, 20)
    assert verbs.run(["checkpoint", "list", str(run_dir)]) == 0  # which reads no data
    assert verbs.run(["checkpoint", "list", str(run_dir), "--verify"]) == command.EXIT_DAMAGED
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["40"].endswith("unfinished")
    assert lines["30"].endswith("ok")
    assert "damaged: data-" in lines["20"]


def test_the_command_does_not_import_tensorflow(run_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, tfdist\n"
        "from tfdist.commands import verbs\n"
        f"assert verbs.run(['checkpoint', 'list', {str(run_dir)!r}, '--verify']) == 0\n"
        "assert not {'tensorflow', 'keras', 'gin'} & set(sys.modules)\n"
    )
    support.run_python([script]).check()
