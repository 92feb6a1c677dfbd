"""The order of examples that lie in files: permuted by blocks, read by streams, the same for any number of workers.

Records are cut into blocks, runs of neighbors within one file. An epoch permutes the blocks by (seed, epoch) and lays
them end to end. The line is cut into streams, and every global batch takes its examples from all streams, each at a
fixed place of the batch. A worker, whose replicas take fixed places of each batch, therefore reads the blocks of its
own streams and no others. Within a stream records are permuted window by window.

Invariant: position → record is a bijection on 0 … N - 1 that depends on (blocks, batch size, seed, epoch) alone.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np

MOST_STREAMS = 32
WINDOW_BLOCKS = 4
MOST_WINDOW_RECORDS = 1 << 16  # a permutation of more would take more memory than it mixes

Window = tuple[int, int]
Taken = tuple[Window, slice, np.ndarray]


class Share(NamedTuple):
    """What a stream gives to a run of neighboring places of a batch.

    Attributes:
      begin, end: places in the run.
      each: records that the stream gives to a whole batch.
      skipped: those of them that stand before the run.
    """

    stream: int
    begin: int
    end: int
    each: int
    skipped: int


@dataclasses.dataclass(frozen=True, eq=False)
class BlockOrder:
    """Where the records of an epoch stand.

    Args:
      block_sizes: records of each block, in the order of the records.
      batch_size: examples of a global batch.
      seed: of the permutations; None permutes nothing, so that streams go through neighbors in their order.
      window_blocks: how many blocks' worth of neighboring records of a stream are permuted among each other.
    """

    block_sizes: tuple[int, ...]
    batch_size: int
    seed: int | None
    window_blocks: int = WINDOW_BLOCKS

    @functools.cached_property
    def num_records(self) -> int:
        return sum(self.block_sizes)

    def records(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """int64 [n] record numbers at int64 [n] positions of an epoch."""
        found = np.empty_like(positions)
        for window, places, ranks in self.windows(positions):
            found[places] = self.numbers(window, ranks, epoch)
        return found

    def numbers(self, window: Window, ranks: np.ndarray, epoch: int) -> np.ndarray:
        """int64 [n] record numbers at int64 [n] ranks of a window."""
        offsets = self.mixing(window, epoch)[ranks]
        firsts, counts = np.array(self.runs(window, epoch), np.int64).T
        ends = np.cumsum(counts)
        run = np.searchsorted(ends, offsets, side="right")
        return firsts[run] + offsets - (ends - counts)[run]

    @functools.cached_property
    def first_left_over(self) -> int:
        """The first position at which the batch's places are no longer those of the streams."""
        return self._num_even_batches * self.batch_size

    def windows(self, positions: np.ndarray) -> list[Taken]:
        """The windows that the positions lie in: (window, places in `positions`, int64 ranks in the window).

        Neighboring positions of one window come together; one that is left and entered again comes twice.
        """
        stream, offset = self._stream_places(positions)
        window = self._windows_at(stream, offset)
        found = []
        for places in stretches(stream * (int(window.max(initial=0)) + 1) + window):
            key = int(stream[places.start]), int(window[places.start])
            found.append((key, places, offset[places] - self.extent(key)[0]))
        return found

    def mixing(self, window: Window, epoch: int) -> np.ndarray:
        """By rank, the offset of the record that has it: a permutation of a window, int64 [size]."""
        begin, end = self.extent(window)
        if self.seed is None:
            return np.arange(end - begin)
        return _permutation(end - begin, (self.seed, epoch, *window))

    def extent(self, window: Window) -> tuple[int, int]:
        """Where in its stream a window begins and ends."""
        begin, end = self._window_range(*window)
        return begin - self._edges[window[0]], end - self._edges[window[0]]

    def shares(self, slot: int, count: int) -> list[Share]:
        """What each stream gives to places slot … slot + count - 1 of every batch before `first_left_over`."""
        edges, end = self._slots.tolist(), slot + count
        streams = range(bisect.bisect_right(edges, slot) - 1, bisect.bisect_left(edges, end))
        found = []
        for s in streams:
            first, last = max(slot, edges[s]), min(end, edges[s + 1])
            found.append(Share(s, first - slot, last - slot, edges[s + 1] - edges[s], first - edges[s]))
        return found

    def runs(self, window: Window, epoch: int) -> list[tuple[int, int]]:
        """The runs of records, (first, count), that a window consists of."""
        begin, end = self._window_range(*window)
        starts, firsts = _epoch_line(self, epoch)
        found = []
        block = int(np.searchsorted(starts, begin, side="right")) - 1
        while begin < end:
            stop = min(end, int(starts[block + 1]) if block + 1 < len(starts) else end)
            found.append((int(firsts[block] + begin - starts[block]), stop - begin))
            begin, block = stop, block + 1
        return found

    def _windows_at(self, stream: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """The window in which each offset of a stream lies."""
        return (offset + self._phases[stream]) // self._width

    def _window_range(self, stream: int, window: int) -> tuple[int, int]:
        """Where a window begins and ends on the epoch's line. The first windows of streams differ in length, so that
        not all streams come to a new one in the same step."""
        origin = self._edges[stream] - self._shifts[stream]
        begin = max(self._edges[stream], origin + window * self._width)
        return begin, min(self._edges[stream + 1], origin + (window + 1) * self._width)

    @functools.cached_property
    def _width(self) -> int:
        return max(1, min(self.window_blocks * max(self.block_sizes), MOST_WINDOW_RECORDS))

    @functools.cached_property
    def _phases(self) -> np.ndarray:
        count = len(self._slots) - 1
        return np.arange(count, dtype=np.int64) * self._width // count

    @functools.cached_property
    def _slots(self) -> np.ndarray:
        """Where each stream's places in a batch begin, and their end: int64 [num_streams + 1]."""
        count = min(MOST_STREAMS, self.batch_size)
        return np.arange(count + 1, dtype=np.int64) * self.batch_size // count

    @functools.cached_property
    def _bounds(self) -> np.ndarray:
        """Where each stream begins on the epoch's line of records, and the end: int64 [num_streams + 1]."""
        return self._slots * self.num_records // self.batch_size

    @functools.cached_property
    def _edges(self) -> list[int]:
        return self._bounds.tolist()

    @functools.cached_property
    def _shifts(self) -> list[int]:
        return self._phases.tolist()

    @functools.cached_property
    def _num_even_batches(self) -> int:
        """Batches to which every stream gives its full share; what is left over makes the last ones."""
        return int(np.min(np.diff(self._bounds) // np.diff(self._slots)))

    def _stream_places(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The stream of each position, and its offset in the stream."""
        shares = np.diff(self._slots)
        batch, slot = np.divmod(positions, self.batch_size)
        stream = np.searchsorted(self._slots, slot, side="right") - 1
        offset = batch * shares[stream] + slot - self._slots[stream]
        # The left-overs of all streams, one stream after the other.
        used = self._num_even_batches * shares
        left = np.concatenate([[0], np.cumsum(np.diff(self._bounds) - used)])
        rank = positions - self._num_even_batches * self.batch_size
        is_left_over = rank >= 0
        late_stream = np.searchsorted(left, np.maximum(rank, 0), side="right") - 1
        late_stream = np.minimum(late_stream, len(shares) - 1)
        stream = np.where(is_left_over, late_stream, stream)
        return stream, np.where(is_left_over, used[stream] + rank - left[stream], offset)


def stretches(keys: np.ndarray) -> list[slice]:
    """Where equal neighbors stand in `keys`, [n]."""
    edges = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
    return [slice(begin, end) for begin, end in itertools.pairwise(edges) if begin < end]


@functools.lru_cache(maxsize=4)
def _epoch_line(order: BlockOrder, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """For the permuted blocks: where each begins on the line, and the number of its first record."""
    sizes = np.asarray(order.block_sizes, np.int64)
    firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    if order.seed is None:
        return firsts, firsts
    permutation = _permutation(len(sizes), (order.seed, epoch))
    starts = np.concatenate([[0], np.cumsum(sizes[permutation])[:-1]])
    return starts, firsts[permutation]


@functools.lru_cache(maxsize=4 * MOST_STREAMS)
def _permutation(size: int, key: tuple[int, ...]) -> np.ndarray:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).permutation(size)
