"""Slices of tensors become whole tensors again."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.checkpoint.format.slices import cut, joined, marked, whole_name, whole_shape


def test_slices_are_put_together_under_the_name_of_the_whole() -> None:
    whole = np.arange(24.0).reshape(2, 12)
    kernel, slot = "model/dense/kernel", "optimizer/dense/kernel"
    names = [marked(kernel, i, count=3, axis=1) for i in range(3)]
    slots = [f"{marked(slot, i, count=3, axis=1)}/momentum" for i in range(3)]
    tensors = {name: cut(whole, name) for name in [*names, *slots]} | {"model/dense/bias": whole}
    assert tensors[names[1]].tolist() == whole[:, 4:8].tolist()
    assert {whole_name(name) for name in tensors} == {kernel, f"{slot}/momentum", "model/dense/bias"}
    assert whole_shape((2, 4), names[0]) == (2, 12) and whole_shape((2, 12), "model/dense/bias") == (2, 12)
    found = joined(tensors)
    assert found.keys() == {kernel, f"{slot}/momentum", "model/dense/bias"}
    for array in found.values():
        np.testing.assert_array_equal(array, whole)
    assert not found[kernel].flags.writeable
    del tensors[names[2]]
    with pytest.raises(DamagedCheckpoint, match="of the 3 parts of model/dense/kernel it has 2"):
        joined(tensors)
