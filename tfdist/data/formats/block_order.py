"""The order of examples that lie in files: permuted by blocks, read by streams, the same for any number of workers.

Records are numbered through the files and cut into blocks of one size. An epoch permutes the blocks by (seed, epoch)
and lays them end to end. The line is cut into streams, and every global batch takes its examples from all streams, each
at a fixed place of the batch. A worker, whose replicas take fixed places of each batch, therefore reads the blocks of
its own streams and no others. Within a stream records are permuted window by window. What is left over behind the last
full batch is a window of its own in each stream.

Invariant: position → record is a bijection on 0 … N - 1 that depends on (N, block and batch size, seed, epoch) alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np

MAX_STREAMS = 32
WINDOW_BLOCKS = 4
MAX_WINDOW_RECORDS = 1 << 16  # a permutation of more would take more memory than it mixes
# Every stream has one window in use and, at a border, a second one.
MAX_WINDOWS = 2 * MAX_STREAMS + 8
REMAINDER = -1  # the number of a stream's last window

Run = tuple[int, int]
ReadRuns = Callable[[Sequence[Run]], list[bytes]]


@dataclasses.dataclass(frozen=True)
class BlockOrder:
    """The order of an epoch's records.

    Args:
      num_records: of an epoch.
      block_records: records of a block; the last block has what remains.
      batch_size: examples of a global batch.
      seed: of the permutations.
    """

    num_records: int
    block_records: int
    batch_size: int
    seed: int

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stream, window and place in the window of int64 [n] positions of an epoch, int64 [n] each."""
        batch, slot = np.divmod(positions, self.batch_size)
        stream = np.searchsorted(self._slots, slot, side="right") - 1
        offset = batch * self._shares[stream] + slot - self._slots[stream] + self._phases[stream]
        window, rank = np.divmod(offset, self._width)
        rank -= np.where(window == 0, self._phases[stream], 0)
        left_over = np.flatnonzero(batch >= self._num_batches)
        if len(left_over):
            begins = np.concatenate([[0], np.cumsum(np.diff(self._bounds) - self._num_batches * self._shares)])
            place = slot[left_over]
            stream[left_over] = np.searchsorted(begins, place, side="right") - 1
            window[left_over], rank[left_over] = REMAINDER, place - begins[stream[left_over]]
        return stream, window, rank

    def find_runs(self, stream: int, window: int, epoch: int) -> list[Run]:
        """The runs of records, (first, count), that a window consists of."""
        even = int(self._num_batches * self._shares[stream])
        begin, end = even, int(self._bounds[stream + 1] - self._bounds[stream])
        if window != REMAINDER:
            begin = window * self._width - int(self._phases[stream])
            begin, end = max(0, begin), min(even, begin + self._width)
        return self._find_line_runs(int(self._bounds[stream]) + begin, int(self._bounds[stream]) + end, epoch)

    def permute_window(self, size: int, stream: int, window: int, epoch: int) -> np.ndarray:
        """Permutes the records of a window: the record at each of its positions, int64 [size]."""
        return _generator(self.seed, epoch, stream, window + 1).permutation(size)

    def _find_line_runs(self, begin: int, end: int, epoch: int) -> list[Run]:
        """The runs of records at places begin … end - 1 of the epoch's line."""
        shift, blocks = _permuted_blocks(self.num_records, self.block_records, self.seed, epoch)
        found = []
        while begin < end:
            block, offset = divmod(begin, self.block_records)
            first = (shift + int(blocks[block]) * self.block_records + offset) % self.num_records
            count = min(end - begin, self.block_records - offset, self.num_records - first)
            found.append((first, count))
            begin += count
        return found

    @functools.cached_property
    def _num_batches(self) -> int:
        """Full batches, to which every stream gives its share."""
        return self.num_records // self.batch_size

    @functools.cached_property
    def _slots(self) -> np.ndarray:
        """The bounds of each stream's positions in a batch, int64 [num_streams + 1]."""
        count = min(MAX_STREAMS, self.batch_size)
        return np.arange(count + 1, dtype=np.int64) * self.batch_size // count

    @functools.cached_property
    def _shares(self) -> np.ndarray:
        """The number of positions of a batch that each stream has, int64 [num_streams]."""
        return np.diff(self._slots)

    @functools.cached_property
    def _bounds(self) -> np.ndarray:
        """The bounds of each stream on the epoch's line of records, int64 [num_streams + 1]."""
        return self._slots * self.num_records // self.batch_size

    @functools.cached_property
    def _width(self) -> int:
        """Records of a window: what a batch takes of a stream lies in two of them at most."""
        return max(int(self._shares.max()), min(WINDOW_BLOCKS * self.block_records, MAX_WINDOW_RECORDS))

    @functools.cached_property
    def _phases(self) -> np.ndarray:
        """The records that each stream's first window lacks, so that not all come to a new one in the same step."""
        return np.arange(len(self._shares), dtype=np.int64) * self._width // len(self._shares)


class WindowReader:
    """A function from positions, int64 [n], and the epoch to the records there, objects [n].

    Each window is read once, by the thread that asks first, and held while it is in use.

    Args:
      order: where which record stands.
      read_runs: reads runs of neighboring records, (first, count) each, one after the other.
    """

    def __init__(self, order: BlockOrder, read_runs: ReadRuns) -> None:
        self._order = order
        self._read_runs = read_runs
        self._find_window = functools.lru_cache(MAX_WINDOWS)(lambda *key: _Window())

    def __call__(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        records = np.empty(len(positions), object)
        stream, window, rank = self._order.locate(positions)
        edges = np.flatnonzero((np.diff(stream) != 0) | (np.diff(window) != 0)) + 1
        for begin, end in itertools.pairwise([0, *edges.tolist(), len(positions)]):
            if begin < end:
                records[begin:end] = self._load_window(int(stream[begin]), int(window[begin]), epoch)[rank[begin:end]]
        return records

    def _load_window(self, stream: int, window: int, epoch: int) -> np.ndarray:
        held = self._find_window(stream, window, epoch)
        with held.lock:
            if held.records is None:
                read = as_array(self._read_runs(self._order.find_runs(stream, window, epoch)))
                held.records = read[self._order.permute_window(len(read), stream, window, epoch)]
        return held.records


class _Window:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.records: np.ndarray | None = None


def as_array(records: Sequence[bytes]) -> np.ndarray:
    """Objects, [n]; `np.asarray` would look at every byte."""
    held = np.empty(len(records), object)
    held[:] = records
    return held


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@functools.lru_cache(maxsize=4)
def _permuted_blocks(num_records: int, block_records: int, seed: int, epoch: int) -> tuple[int, np.ndarray]:
    """The record at which the first block begins, so that the short one is another each epoch, and the order of all."""
    draw = _generator(seed, epoch)
    full, rest = divmod(num_records, block_records)
    blocks = np.arange(full + (rest > 0))
    draw.shuffle(blocks[:full])
    return int(draw.integers(num_records)), blocks
