"""An order of records in files whose batches hold records of like length, so that little is padded.

Within a window of so many batches each stream sorts its records by length and deals them out: to batch j goes the j-th
part of every stream's window, and the batches of a window are permuted, all streams alike. A worker still reads only
the blocks of its own streams.

Invariant: as `BlockOrder`'s. What is left over behind the last full batches is not sorted.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from tfdist.data.order.block_order import MOST_STREAMS, BlockOrder, Window, _permutation


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LengthOrder(BlockOrder):
    """A `BlockOrder` that also knows lengths.

    Args:
      lengths: of every record.
      window_batches: among how many batches records are exchanged; more make batches more even, and cost memory.
    """

    lengths: np.ndarray
    window_batches: int

    def mixing(self, window: Window, epoch: int) -> np.ndarray:
        stream, number = window
        if number == self._last_window:
            begin, end = self.extent(window)
            return np.arange(end - begin)
        first, last = self._batches(number)
        share = int(np.diff(self._slots)[stream])
        dealt = _permutation(last - first, (self.seed, epoch, MOST_STREAMS, number))
        return _by_length(self, epoch, stream, number).reshape(-1, share)[dealt].reshape(-1)

    def _windows_at(self, stream: np.ndarray, offset: np.ndarray) -> np.ndarray:
        batch = offset // np.diff(self._slots)[stream]
        return np.where(batch < self._num_even_batches, batch // self.window_batches, self._last_window)

    @property
    def _last_window(self) -> int:
        """The number of the window that holds what is left over."""
        return -(-self._num_even_batches // self.window_batches)

    def _batches(self, window: int) -> tuple[int, int]:
        first = min(window * self.window_batches, self._num_even_batches)
        return first, min(first + self.window_batches, self._num_even_batches)

    def _window_range(self, stream: int, window: int) -> tuple[int, int]:
        share, origin = int(np.diff(self._slots)[stream]), int(self._bounds[stream])
        first, last = self._batches(window)
        end = int(self._bounds[stream + 1]) if window == self._last_window else origin + last * share
        return origin + first * share, end


@functools.lru_cache(maxsize=4 * MOST_STREAMS)
def _by_length(order: LengthOrder, epoch: int, stream: int, window: int) -> np.ndarray:
    """Offsets in a window by the length of the records there; which of equal ones comes first is drawn."""
    runs = [np.arange(first, first + count) for first, count in order.runs((stream, window), epoch)]
    numbers = np.concatenate(runs)
    shuffled = _permutation(len(numbers), (order.seed, epoch, stream, window))
    return shuffled[np.argsort(order.lengths[numbers[shuffled]], kind="stable")]
