"""Values that are put in place without a copy."""

from __future__ import annotations

import keras
import ml_dtypes
import numpy as np
import pytest

from tfdist.backup.stored_files import _aligned
from tfdist.training.state import _as_tensor

NUM_ITEMS = 2**16


def aligned(dtype: str) -> np.ndarray:
    array = _aligned(NUM_ITEMS * np.dtype(dtype).itemsize).view(dtype)
    array[:] = np.arange(NUM_ITEMS) % 100
    return array


def address(variable: keras.Variable) -> int:
    return variable.value.read_value().__array__().ctypes.data


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8"])
def test_a_variable_begins_in_the_memory_that_it_is_given_and_leaves_it_at_its_first_update(dtype: str) -> None:
    """TensorFlow does not write to memory that is not its own."""
    array = aligned(dtype)
    before = array.copy()
    array.flags.writeable = False  # as restore gives them
    variable = keras.Variable(np.zeros(NUM_ITEMS), dtype=dtype)
    variable.assign(_as_tensor(array))
    assert address(variable) == array.ctypes.data
    variable.value.assign_add(np.ones(NUM_ITEMS, dtype))
    assert address(variable) != array.ctypes.data
    np.testing.assert_array_equal(variable.numpy(), before + before.dtype.type(1))
    np.testing.assert_array_equal(array, before)


def test_two_variables_given_the_same_memory_do_not_change_each_other() -> None:
    array = aligned("float32")
    expected = array.copy()
    tensor = _as_tensor(array)
    one, other = (keras.Variable(np.zeros(NUM_ITEMS), dtype="float32") for _ in range(2))
    one.assign(tensor)
    other.assign(tensor)
    del tensor
    one.value.assign_add(np.ones(NUM_ITEMS, np.float32))
    np.testing.assert_array_equal(one.numpy(), expected + 1)
    np.testing.assert_array_equal(other.numpy(), expected)


def odd_arrays() -> list[np.ndarray]:
    return [aligned("float32")[1:], aligned("float32")[::2], aligned("float32").astype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("array", odd_arrays(), ids=["unaligned", "strided", "bfloat16"])
def test_what_tensorflow_cannot_use_as_it_lies_is_copied(array: np.ndarray) -> None:
    variable = keras.Variable(np.zeros(array.shape), dtype=array.dtype.name)
    variable.assign(_as_tensor(array))
    assert address(variable) != array.ctypes.data
    np.testing.assert_array_equal(variable.numpy(), array)
