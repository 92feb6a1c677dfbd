"""A crash at every step of what a save does to the disk: a whole checkpoint, the earlier or the new one, restores."""

from __future__ import annotations

import pathlib

import pytest
from checkpoint.checkpoints import Listener, assert_same, new_manager, save_steps, state_of, steps
from storage import faulty

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints

pytestmark = pytest.mark.slow


def test_wherever_a_save_is_cut_off_the_newest_whole_checkpoint_restores(tmp_path: pathlib.Path) -> None:
    """A removal that is cut off leaves the whole checkpoint or a leftover."""
    restored_steps: list[int] = []

    def save_two(index: int) -> None:
        manager = new_manager(tmp_path / str(index), keep_last=1, on_error="stop")
        for step in (2, 3):  # the first finds a leftover, and both have something to prune
            manager.save(state_of(step))
            manager.wait()
        manager.close()

    def function(index: int) -> None:
        with faulty.installed(faulty.Calls()):
            save_steps(tmp_path / str(index), 1)
            (tmp_path / str(index) / "step-000000000002-0123456789ab").mkdir()
            (tmp_path / str(index) / "notes.txt").write_text("of the user")
        save_two(index)

    def check(index: int, crash: str | None) -> None:
        directory, listener = tmp_path / str(index), Listener()
        restored = restore.load_newest(str(directory), tell=listener)
        assert_same(restored, state_of(restored.step))
        assert listener.warnings == []  # a torn checkpoint does not exist, so there is nothing to pass over
        restored_steps.append(restored.step)
        for entry in list_checkpoints(str(directory)):
            if not entry.is_leftover:
                assert_same(restore.load(entry.path), state_of(entry.step))
        _train_on(directory, after=restored.step)

    num_boundaries = faulty.crash_everywhere(function, check)
    assert num_boundaries > 50
    assert restored_steps == sorted(restored_steps)  # the later the crash, the later the step
    assert set(restored_steps) == {1, 2, 3}


def _train_on(directory: pathlib.Path, *, after: int) -> None:
    """The next start, which does the lost steps once more."""
    manager = new_manager(directory, keep_last=1, on_error="stop")
    for step in range(after + 1, 5):
        manager.save(state_of(step))
        manager.wait()
    manager.close()
    assert steps(list_checkpoints(str(directory))) == [4]
    (entry,) = list_checkpoints(str(directory))
    assert {str(path) for path in directory.iterdir()} == {entry.path, str(directory / "notes.txt")}
