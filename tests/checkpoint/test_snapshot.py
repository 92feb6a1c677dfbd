"""Copies of TensorFlow's and Keras's variables: right, at once, and nothing held afterwards."""

from __future__ import annotations

import dataclasses
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint.checkpoints import Gate, Listener, assert_same, new_manager, save_state
from storage import faulty

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.checkpoint.restore import State
from tfdist.checkpoint.write.snapshot import HostBuffer, SnapshotBuffer, view_arrays


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
