"""The manager against real files: round trips, errors of the store, two buffers, two savers."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint.checkpoints import (
    IDENTITY,
    Gate,
    Listener,
    assert_same,
    new_manager,
    save_state,
    save_steps,
    state_of,
    steps,
)
from storage import faulty

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints, verify
from tfdist.checkpoint.restore import State
from tfdist.checkpoint.write import manager as manager_module
from tfdist.checkpoint.write.snapshot import HostBuffer, SnapshotBuffer, view_arrays
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


# Copies of variables


def test_every_kind_of_variable_and_tensor_is_saved(tmp_path: pathlib.Path) -> None:
    tensors = {
        "variable": tf.Variable([[1.5, -2.0]]),
        "half": tf.Variable([1.5, 2.5], dtype=tf.bfloat16),
        "flag": tf.Variable(True),
        "count": tf.Variable(2**40, dtype=tf.int64),
        "keras": keras.Variable(np.ones((2, 2)), dtype="float16", name="k"),
        "seeds": keras.random.SeedGenerator(3).state,
        "tensor": tf.constant([1, 2, 3], tf.uint8),
        "nothing": tf.zeros((0, 4)),
        "array": np.eye(3),
        "number": np.float32(0.1),
    }
    expected = {name: np.asarray(getattr(tensor, "numpy", lambda t=tensor: t)()) for name, tensor in tensors.items()}
    save_state(tmp_path, State(1, tensors, {}))
    assert_same(restore.load_newest(str(tmp_path), tell=Listener()), State(1, expected, {}))


def test_a_checkpoint_holds_the_values_of_the_moment_of_save(tmp_path: pathlib.Path) -> None:
    """Of what is larger than a thread's piece and updated in place before anything of it is written, too."""
    first = np.random.default_rng(1).normal(size=3_000_001).astype(np.float32)
    state = State(1, {"weights": tf.Variable(first), "counts": np.zeros(3)}, {"sums": [1.0]})
    gate, manager = Gate(), new_manager(tmp_path, on_error="stop")
    with faulty.installed(gate):
        manager.save(state)
        state.tensors["weights"].assign_add(tf.ones_like(first))
        state.tensors["counts"][:] = 99
        state.values["sums"][0] = 99.0
        gate.opened.set()
        manager.save(dataclasses.replace(state, step=2))
        manager.close()
    for entry, weights, number in zip(list_checkpoints(str(tmp_path)), (first, first + 1), (0, 99), strict=True):
        tensors = {"weights": weights, "counts": np.full(3, float(number))}
        assert_same(restore.load(entry.path), State(entry.step, tensors, {"sums": [number or 1.0]}))


def test_a_variable_is_updated_in_place_after_a_snapshot_of_it() -> None:
    """Held views would make TensorFlow copy the variable on its next update."""
    variable = tf.Variable(tf.zeros(1000))
    pool = SnapshotBuffer(max_file_bytes=2**20)
    address = _address(variable)
    assert view_arrays({"weights": variable})["weights"].__array_interface__["data"][0] == address
    buffer, _ = pool.take(view_arrays({"weights": variable}))
    variable.assign_add(tf.ones(1000))
    assert _address(variable) == address
    assert (buffer.contents[0].view(np.float32) == 0).all()
    pool.close()


@pytest.mark.parametrize(
    ("method", "raised", "told"),
    [
        ("__init__", MemoryError(), "no room for a copy of 4,000 bytes"),
        ("__init__", OSError("cannot map memory"), "cannot map memory"),
        ("fill", RuntimeError("a device is gone"), "a device is gone"),
    ],
)
def test_a_snapshot_that_failed_leaves_the_buffer_to_the_next(
    monkeypatch: pytest.MonkeyPatch, method: str, raised: Exception, told: str
) -> None:
    def fail(*args: object) -> None:
        raise raised

    pool = SnapshotBuffer(max_file_bytes=2**20)
    arrays = {"a": np.ones(1000, np.float32)}
    with monkeypatch.context() as patched:
        patched.setattr(HostBuffer, method, fail)
        for _ in range(2):
            with pytest.raises(type(raised), match=told):
                pool.take(arrays)
    assert pool.take(arrays)[0].contents[0].view(np.float32).all()
    pool.close()


def _address(variable: tf.Variable) -> int:
    return np.asarray(variable.read_value()).__array_interface__["data"][0]
