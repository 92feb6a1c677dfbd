"""Sources of records that lie in files and are read in runs of neighbours.

Invariant: over an epoch a worker reads each record of its streams once, and of the others none (a stream that two
workers share, where their number does not divide the streams', is read by both). Records are held only while their
window is in use. Formats derive from `RecordSource` and say how to read a run and how to decode records.
"""

from __future__ import annotations

import abc
import collections
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.block_order import MOST_STREAMS, BlockOrder, Window
from tfdist.data.failures import noted
from tfdist.data.source import Order, Reader, Source, Staged

BLOCK_RECORDS = 256
# Every stream has one window in use and, at a border, a second one.
MOST_WINDOWS = 2 * MOST_STREAMS + 8

Run = tuple[int, int]


class RecordSource(Source):
    """A source whose records are numbered through its files.

    Args:
      file_sizes: records of each file, in order; 0 is fine.
      block_records: how many neighbours stay together when the order is permuted; larger reads are cheaper, smaller
        ones mix better.
    """

    calls_python = True

    def __init__(self, file_sizes: Sequence[int], *, block_records: int = BLOCK_RECORDS) -> None:
        self.file_sizes = tuple(int(size) for size in file_sizes)
        self.num_examples = sum(self.file_sizes)
        self._file_starts = np.concatenate([[0], np.cumsum(self.file_sizes)]).astype(np.int64)
        self._block_records = block_records

    @abc.abstractmethod
    def read_run(self, file: int, first: int, count: int) -> list[bytes]:
        """Records first … first + count - 1 of a file; called by several threads at once."""

    @abc.abstractmethod
    def decode(self, records: tf.Tensor) -> Any:
        """The nest of a batch from string [n] records, in TensorFlow operations."""

    def reader(self, order: Order) -> Reader:
        fetch = self._in_order if order.seed is None else self._permuted(order)
        safe = noted(lambda positions, epoch: fetch(positions, int(epoch)))

        def records(positions: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(safe, [positions, epoch], tf.string), [None])

        return Staged(records, self.decode)

    def numbers(self, order: Order) -> Reader:
        return numbers_of_blocks(None if order.seed is None else self.block_order(order))

    def block_order(self, order: Order) -> BlockOrder:
        """Where the records of an epoch stand, for an order with a seed."""
        return BlockOrder(self._block_sizes(), batch_size=order.batch_size, seed=order.seed)

    def _in_order(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        del epoch
        records: list[bytes] = []
        for begin, end in _consecutive(positions):
            records += self._read(int(positions[begin]), end - begin)
        return _as_array(records)

    def _permuted(self, order: Order) -> Callable[[np.ndarray, int], np.ndarray]:
        blocks = self.block_order(order)
        windows = WindowCache(lambda window, epoch: self._read_window(blocks, window, epoch))

        def fetch(positions: np.ndarray, epoch: int) -> np.ndarray:
            records = np.empty(len(positions), object)
            for window, places, offsets in blocks.windows(positions, epoch):
                if positions[places.start] >= blocks.first_left_over and not windows.holds(window, epoch):
                    # Another worker's stream: only these few records of it are wanted here.
                    numbers = blocks.numbers(window, offsets, epoch).tolist()
                    records[places] = _as_array([record for n in numbers for record in self._read(n, 1)])
                else:
                    records[places] = windows.get(window, epoch)[offsets]
            return records

        return fetch

    def _block_sizes(self) -> tuple[int, ...]:
        """Every file in blocks of as equal a size as can be, at most `block_records`."""
        sizes: list[int] = []
        for size in self.file_sizes:
            count = -(-size // self._block_records)
            sizes += [size * (i + 1) // count - size * i // count for i in range(count)]
        return tuple(sizes)

    def _read_window(self, blocks: BlockOrder, window: Window, epoch: int) -> np.ndarray:
        return _as_array([record for run in blocks.runs(window, epoch) for record in self._read(*run)])

    def _read(self, first: int, count: int) -> list[bytes]:
        """Records by their number in the whole source."""
        records: list[bytes] = []
        while count:
            file = int(np.searchsorted(self._file_starts, first, side="right")) - 1
            here = min(count, int(self._file_starts[file + 1]) - first)
            records += self.read_run(file, first - int(self._file_starts[file]), here)
            first, count = first + here, count - here
        return records


def numbers_of_blocks(blocks: BlockOrder | None) -> Reader:
    """`Source.numbers` of a source in files: None keeps the examples in their own order."""
    if blocks is None:
        return lambda positions, epoch: positions
    safe = noted(lambda positions, epoch: np.asarray(blocks.records(positions, int(epoch)), np.int64))

    def numbers(positions: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(safe, [positions, epoch], tf.int64, stateful=False), [None])

    return numbers


class WindowCache:
    """The windows in use. Each is read once, by the thread that asks first; others wait for it."""

    def __init__(self, read: Callable[[Window, int], np.ndarray]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._held: collections.OrderedDict[tuple[Window, int], _Slot] = collections.OrderedDict()

    def holds(self, window: Window, epoch: int) -> bool:
        return (window, epoch) in self._held

    def get(self, window: Window, epoch: int) -> np.ndarray:
        with self._lock:
            slot = self._held.get((window, epoch)) or self._held.setdefault((window, epoch), _Slot())
            self._held.move_to_end((window, epoch))
            while len(self._held) > MOST_WINDOWS:
                self._held.popitem(last=False)
        if slot.records is None:
            with slot.lock:
                if slot.records is None:
                    slot.records = self._read(window, epoch)
        return slot.records


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.records: np.ndarray | None = None


def _as_array(records: Sequence[bytes]) -> np.ndarray:
    """Objects, [n]; `np.asarray` would look at every byte."""
    held = np.empty(len(records), object)
    held[:] = records
    return held


def _consecutive(positions: np.ndarray) -> list[Run]:
    """Where runs of consecutive numbers begin and end."""
    edges = np.concatenate([[0], np.nonzero(np.diff(positions) != 1)[0] + 1, [len(positions)]])
    return [(int(begin), int(end)) for begin, end in itertools.pairwise(edges)]
