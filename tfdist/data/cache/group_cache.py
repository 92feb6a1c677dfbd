"""The groups of rows in use, decoded.

Invariant: a group is read by the thread that asks first, while others wait for it, and is held until others that were
used later fill the room.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.data.order.block_order import MOST_STREAMS

Group = list[np.ndarray]
# Every stream has one group in use and, at a border, a second one; some threads are ahead of others.
MOST_IN_USE = 2 * MOST_STREAMS + 8


class GroupCache:
    """Groups by number.

    Args:
      read: gives a group, arrays of one length.
      sizes: rows of each group.
      most_rows: how many rows to hold; more where the streams' own groups have more.
      window_groups: over how many groups of a stream rows are permuted.
    """

    def __init__(
        self, read: Callable[[int], Group], sizes: Sequence[int], *, most_rows: int, window_groups: int
    ) -> None:
        self._read = read
        self._sizes = sizes
        self._room = max(most_rows, MOST_IN_USE * window_groups * max(sizes))
        self._rows = 0
        self._lock = threading.Lock()
        self._held: collections.OrderedDict[int, _Slot] = collections.OrderedDict()

    def get(self, group: int) -> Group:
        """The group, read if it is not held; a thread that wants one that another reads waits for that."""
        with self._lock:
            if group not in self._held:
                self._held[group] = _Slot()
                self._rows += self._sizes[group]
            slot = self._held[group]
            self._held.move_to_end(group)
            while self._rows > self._room:
                self._rows -= self._sizes[self._held.popitem(last=False)[0]]
        with slot.lock:
            if slot.arrays is None:
                slot.arrays = self._read(group)
        return slot.arrays


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.arrays: Group | None = None
