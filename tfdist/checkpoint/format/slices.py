"""Tensors of which each replica has a slice: how slices are called in a checkpoint, and how they become whole again.

Invariant: whoever reads a checkpoint sees whole tensors under their own names, whatever number of replicas wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from tfdist.checkpoint.format.manifest import DamagedCheckpoint

_MARK = re.compile(r"\.part(\d+)of(\d+)axis(\d+)")


def mark_slice(name: str, index: int, *, count: int, axis: int) -> str:
    """The name of slice `index` of `count`, cut along an axis."""
    return f"{name}.part{index}of{count}axis{axis}"


def whole_name(name: str) -> str:
    """The name without a mark; "dense/kernel" for "dense/kernel.part0of2axis1", also within a slot's name."""
    return _MARK.sub("", name)


def cut_slice(array: np.ndarray, name: str) -> np.ndarray:
    """Of a whole array the slice that a marked name means; all of it for any other name."""
    found = _MARK.search(name)
    if found is None or not array.ndim:
        return array
    index, count, axis = map(int, found.groups())
    return np.split(array, count, axis)[index]


def whole_shape(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """The shape of the whole, of that of a slice with a marked name."""
    found = _MARK.search(name)
    if found is None or not shape:
        return shape
    _, count, axis = map(int, found.groups())
    return (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])


def join_slices(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, with slices put together under the name of the whole.

    Raises:
      DamagedCheckpoint: a slice is missing.
    """
    found: dict[str, np.ndarray] = {}
    parts: dict[str, dict[int, tuple[str, np.ndarray]]] = {}
    for name, array in tensors.items():
        mark = _MARK.search(name)
        if mark is None:
            found[name] = array
        else:
            parts.setdefault(whole_name(name), {})[int(mark[1])] = (name, array)
    for name, some in parts.items():
        first, array = some[min(some)]
        _, count, axis = map(int, _MARK.search(first).groups())  # type: ignore[union-attr]
        if len(some) != count:
            raise DamagedCheckpoint(f"of the {count} parts of {name} it has {len(some)}")
        found[name] = np.concatenate([some[i][1] for i in range(count)], axis) if array.ndim else array
        found[name].flags.writeable = False
    return found
