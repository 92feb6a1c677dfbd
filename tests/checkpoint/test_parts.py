"""Checkpoints that several workers write: committed when all parts are there, and never without."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import numpy as np
import pytest
from checkpoint.checkpoints import Listener, new_manager

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.checkpoint.restore import State
from tfdist.checkpoint.write import writer
from tfdist.checkpoint.write.manager import CheckpointManager
from tfdist.checkpoint.write.writer import Part


def manager(
    directory: pathlib.Path, index: int, count: int = 3, start: str = "a1", told: Listener | None = None
) -> Any:
    return new_manager(directory, told, part=Part(index, count, start), writers="all")


def state(step: int, index: int) -> State:
    values = {"loss": 0.5} if index == 0 else {}
    return State(step, {f"tensor_{index}": np.full([1000], step + index, np.float32)}, values)


def save(managers: list[Any], step: int) -> None:
    """Has each worker save its part of a step."""
    for index, each in enumerate(managers):
        each.save(state(step, index))


def test_a_checkpoint_is_there_once_all_parts_are(tmp_path: pathlib.Path) -> None:
    managers = [manager(tmp_path, index) for index in range(3)]
    save(managers[:2], 7)
    managers[1].wait()
    assert restore.load_newest(str(tmp_path), tell=Listener()) is None
    managers[2].save(state(7, 2))
    for each in managers:
        each.close()
    found = restore.load_newest(str(tmp_path), tell=Listener())
    assert found is not None and found.step == 7 and found.values == {"loss": 0.5}
    assert {name: float(array[0]) for name, array in found.tensors.items()} == {
        f"tensor_{i}": 7.0 + i for i in range(3)
    }
    assert found.manifest is not None and found.manifest.num_tensors == 3
    (entry,) = list_checkpoints(str(tmp_path))
    assert entry.path == found.path


def test_of_a_worker_that_cannot_write_there_is_no_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Listener()
    managers = [manager(tmp_path, 0, count=2, told=told), manager(tmp_path, 1, count=2)]
    note = Part.note

    def fail(part: Part, path: str, content: dict[str, Any]) -> None:
        if "error" not in content:
            raise OSError("no space left")
        note(part, path, content)

    monkeypatch.setattr(Part, "note", fail)
    save(managers, 3)
    managers[1].wait()
    managers[0].wait()
    assert "worker 1 could not write its part: OSError: no space left" in told.warnings[0]
    assert restore.load_newest(str(tmp_path), tell=Listener()) is None
    monkeypatch.setattr(Part, "note", note)
    save(managers, 4)
    for each in managers:
        each.close()
    found = restore.load_newest(str(tmp_path), tell=Listener())
    assert found is not None and found.step == 4


def test_a_worker_whose_first_start_failed_writes_its_part_of_the_next_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own checkpoints have the numbers of the others' all the same."""
    start, failures = CheckpointManager._start, [1, 1]

    def fail_twice(thread: CheckpointManager) -> None:
        if not thread._part.is_chiefs and failures:
            failures.pop()
            raise OSError("the store does not answer")
        start(thread)

    monkeypatch.setattr(CheckpointManager, "_start", fail_twice)
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 1.0)
    managers = [manager(tmp_path, index, count=2) for index in range(2)]
    for step in (2, 3):
        save(managers, step)
        for each in managers[::-1]:
            each.wait()
    for each in managers:
        each.close()
    assert not failures
    assert [entry.step for entry in list_checkpoints(str(tmp_path)) if entry.manifest is not None] == [3]


def test_nobody_waits_for_a_worker_that_is_gone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Listener()
    chief = manager(tmp_path, 0, count=2, told=told)
    chief.save(state(3, 0))
    waiting = threading.Thread(target=chief.close)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    chief.abandon()
    waiting.join(30)
    assert not waiting.is_alive() and "worker 1 did not write its part" in told.warnings[0]
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.1)
    chief = manager(tmp_path, 0, count=2, told=told)
    chief.save(state(4, 0))
    chief.close()
    assert len(told.warnings) == 2
    assert restore.load_newest(str(tmp_path), tell=Listener()) is None


def test_a_new_start_tidies_up_and_leaves_its_own_alone(tmp_path: pathlib.Path) -> None:
    earlier = manager(tmp_path, 1, count=2, start="old1")
    earlier.save(state(3, 1))
    earlier.close()
    mine = manager(tmp_path, 1, count=2, start="new1")
    mine.save(state(3, 1))
    mine.wait()
    chief = manager(tmp_path, 0, count=2, start="new1")
    chief.save(state(3, 0))
    chief.close()
    mine.close()
    (entry,) = list_checkpoints(str(tmp_path))
    assert entry.manifest is not None and "new1" in entry.path
