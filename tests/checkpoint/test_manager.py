"""The manager against real files: round trips, errors of the store, two buffers, two savers."""

from __future__ import annotations

import errno
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checkpoint.checkpoints import IDENTITY, Gate, Listener, assert_same, new_manager, save_steps, state_of, steps
from storage import faulty

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints, verify
from tfdist.checkpoint.restore import State
from tfdist.checkpoint.write import manager as manager_module
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.lease import LeaseLostError


def test_what_was_saved_is_restored_with_its_manifest(tmp_path: pathlib.Path) -> None:
    manager = new_manager(tmp_path)
    manager.save(state_of(7), metrics={"val_loss": 0.5, "odd": float("nan")})
    manager.close()
    restored = restore.load_newest(str(tmp_path), tell=Listener())
    assert_same(restored, state_of(7))
    assert restored.manifest.identity == IDENTITY
    assert restored.manifest.metrics["val_loss"] == 0.5
    assert np.isnan(restored.manifest.metrics["odd"])
    assert restored.manifest.created.endswith("+00:00")
    assert manager.last_committed_step == 7 and manager.last_write_seconds > 0


@pytest.mark.parametrize(("told_from_seconds", "warned"), [(1e-9, [("warning", 2)]), (60.0, [])])
def test_a_save_waits_while_the_one_before_is_being_written_and_says_so_if_that_is_long(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, told_from_seconds: float, warned: list[object]
) -> None:
    monkeypatch.setattr(manager_module, "LEAST_WAIT_SECONDS", told_from_seconds)
    listener, gate = Listener(), Gate()
    manager = new_manager(tmp_path, listener, keep_last=3)
    with faulty.installed(gate):
        manager.save(state_of(1))
        assert gate.reached.wait(60)
        assert not listener.events("checkpoint_waited")
        second = threading.Thread(target=manager.save, args=[state_of(2)])
        second.start()
        while not manager._buffer._is_free._cond._waiters:  # type: ignore[attr-defined]  # until it waits for the buffer
            assert second.is_alive()
        gate.opened.set()
        second.join(60)
        manager.close()
    assert [(event[0], event[2]) for event in listener.events("checkpoint_waited")] == warned
    for entry in list_checkpoints(str(tmp_path)):
        assert_same(restore.load(entry.path), state_of(entry.step))


def test_tensors_may_change_their_shapes_between_saves(tmp_path: pathlib.Path) -> None:
    manager = new_manager(tmp_path, keep_last=4)
    states = [state_of(step, num_items=num_items) for step, num_items in ((1, 50), (2, 60), (3, 50), (4, 0))]
    for state in states:
        manager.save(state)
    manager.close()
    for entry, state in zip(list_checkpoints(str(tmp_path)), states, strict=True):
        assert_same(restore.load(entry.path), state)


@pytest.mark.parametrize(
    ("name", "part", "why"),
    [
        ("write", "", "No space left on device"),
        ("mkdir", "", "Read-only file system"),
        ("open", ".tfdist-tmp", "Read-only file system"),
        ("replace", "data-00002", "Quota exceeded"),  # one of several uploads
    ],
)
def test_a_store_that_refuses_costs_its_checkpoints_and_nothing_else(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str, part: str, why: str
) -> None:
    class Refusing(faulty.Calls):
        def __getattr__(self, called: str) -> Callable:
            return refuse if called == name else super().__getattr__(called)

    def refuse(*arguments: Any) -> Any:
        if any(part in str(each) for each in arguments):
            raise OSError(errno.EROFS, why, str(tmp_path))
        return getattr(os, name)(*arguments)

    monkeypatch.setattr(files, "is_remote", lambda path: name == "replace")
    listener = Listener()
    save_steps(tmp_path, 1)
    manager = new_manager(tmp_path, listener)
    manager.wait()
    with faulty.installed(Refusing()):
        for step in (2, 3):
            manager.save(state_of(step))
            manager.wait()
    assert [f"The checkpoint of step {2 + n} failed" in told for n, told in enumerate(listener.warnings)] == [True] * 2
    assert all(why in warning for warning in listener.warnings)
    assert manager.last_committed_step is None
    assert steps(list_checkpoints(str(tmp_path))) == [1]  # not even a directory of the others
    assert_same(restore.load_newest(str(tmp_path), tell=Listener()), state_of(1))
    manager.save(state_of(4))  # when it takes them again
    manager.close()
    assert_same(restore.load_newest(str(tmp_path), tell=Listener()), state_of(4))
    assert manager.last_committed_step == 4


def test_a_failed_checkpoint_stops_the_training_that_asked_for_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    manager = new_manager(tmp_path / "file", on_error="stop")
    with pytest.raises(UserError, match=r"Looking for earlier checkpoints failed in .*on_error = 'continue'"):
        manager.wait()
    manager.save(state_of(1))
    with pytest.raises(UserError, match="The checkpoint of step 1 failed"):
        manager.close()
    manager.close()


def test_what_no_checkpoint_can_hold_is_the_users_error_at_once(tmp_path: pathlib.Path) -> None:
    manager = new_manager(tmp_path)
    with pytest.raises(UserError, match=r"cannot keep values\.callbacks\[0\]\.set: it is a set"):
        manager.save(State(1, {}, {"callbacks": [{"set": {1}}]}))
    with pytest.raises(UserError, match="cannot keep the tensor 'words' of type object"):
        manager.save(State(1, {"words": np.array(["a"], object)}, {}))
    manager.save(state_of(2))
    manager.close()
    assert steps(list_checkpoints(str(tmp_path))) == [2]


def answers(*errors: Exception | None) -> Callable[[], None]:
    """Raises these where it is asked whether the directory is still this run's: at the start, the first commit …"""
    left = list(errors)

    def still_ours() -> None:
        if error := left.pop(0) if left else None:
            raise error

    return still_ours


TAKEN = LeaseLostError("another run has taken this directory")


def test_nothing_is_written_or_removed_in_a_directory_that_another_run_took(tmp_path: pathlib.Path) -> None:
    """What was saved before the loss was known is not written either."""
    save_steps(tmp_path, 1, 2)
    gate, manager = Gate(), new_manager(tmp_path, still_ours=answers(None, None, TAKEN), keep_last=2)
    manager.save(state_of(3))
    manager.wait()
    with faulty.installed(gate):
        manager.save(state_of(4))
        threading.Timer(0.05, gate.opened.set).start()
        manager.save(state_of(5))
        for surfacing in (manager.wait, manager.check, lambda: manager.save(state_of(6))):
            with pytest.raises(LeaseLostError, match="another run has taken"):
                surfacing()
        manager.close()
    assert steps(list_checkpoints(str(tmp_path))) == [2, 3]


def test_a_store_that_does_not_answer_the_check_of_the_lease_costs_one_checkpoint(tmp_path: pathlib.Path) -> None:
    outage = OSError(errno.EIO, "503 Service Unavailable", str(tmp_path))
    listener = Listener()
    manager = new_manager(tmp_path, listener, still_ours=answers(None, None, outage))
    for step in (1, 2, 3):
        manager.save(state_of(step))
        manager.wait()
    manager.close()
    assert ["503 Service Unavailable" in message for message in listener.warnings] == [True]
    assert steps(list_checkpoints(str(tmp_path))) == [1, 3]


def test_two_savers_on_one_directory_leave_only_whole_checkpoints(tmp_path: pathlib.Path) -> None:
    """The lease keeps a second run out; if it fails to, both lose at most their own checkpoints."""
    managers = [new_manager(tmp_path, keep_last=3, on_error="stop") for _ in range(2)]
    for manager in managers:
        manager.wait()
    for step in range(1, 21):
        for manager in managers:
            manager.save(state_of(step))
    for manager in managers:
        manager.close()
    entries = list_checkpoints(str(tmp_path))
    assert steps(entries) == [18, 18, 19, 19, 20, 20]
    assert [verify(entry) for entry in entries] == [None] * 6
    for entry in entries:
        assert_same(restore.load(entry.path), state_of(entry.step))


def test_going_back_abandons_the_checkpoints_ahead(tmp_path: pathlib.Path) -> None:
    """Otherwise the next start would take up a future that training has left because it diverged."""
    save_steps(tmp_path, 10, 20, 30)
    assert restore.load(list_checkpoints(str(tmp_path))[0].path).step == 10
    listener = Listener()
    manager = new_manager(tmp_path, listener, keep_last=5)
    manager.save(state_of(20))
    manager.close()
    assert steps(list_checkpoints(str(tmp_path))) == [10, 20]
    assert listener.events("checkpoints_superseded")
