"""Fetches records by their places in a block order: window by window, each read once, held while it is in use.

Invariant: which records come depends on the order and the positions alone; what is held only spares reading. Where a
batch takes its records from is the same in each step until a window ends, so that a step copies one slice a stream.
It runs inside tf.data, in one thread or several.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tfdist.data.order.block_order import MOST_STREAMS, BlockOrder, Window

# Every stream has one window in use and, at a border, a second one.
MOST_WINDOWS = 2 * MOST_STREAMS + 8
# Of a stream, to begin with: more are as quickly read with the rest of their window.
MOST_SINGLE_RECORDS = 16

Run = tuple[int, int]
ReadRuns = Callable[[Sequence[Run]], list[bytes]]


class _Cursor(NamedTuple):
    """The window that a stream is in: where in the stream it begins and ends, and its records by rank."""

    epoch: int
    begin: int
    end: int
    records: np.ndarray


_NOT_BEGUN, _BEGUN = (_Cursor(-1, 0, 0, np.empty(0, object)) for _ in range(2))


class WindowReader:
    """A function from positions, int64 [n], and the epoch to the records there, objects [n].

    Args:
      blocks: where which record stands.
      read_runs: reads runs of neighboring records, (first, count) each, one after the other.
      most_again: where the first batch is no more than this share of an epoch, it is read record by record, and again
        with its windows, so that it does not wait for whole windows, at whatever step it stands.
    """

    def __init__(self, blocks: BlockOrder, *, read_runs: ReadRuns, most_again: float = 0.0) -> None:
        self._blocks = blocks
        self._read_runs = read_runs
        self._begins_singly = blocks.batch_size <= most_again * blocks.num_records
        self._windows = WindowCache(self._read_window)
        self._cursors = [_NOT_BEGUN] * MOST_STREAMS
        self._shares = functools.lru_cache(maxsize=256)(blocks.shares)

    def __call__(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        records = np.empty(len(positions), object)
        for run in consecutive(positions):
            batch, slot = divmod(int(positions[run.start]), self._blocks.batch_size)
            count = run.stop - run.start
            last = int(positions[run.start]) + count
            if last > self._blocks.first_left_over or slot + count > self._blocks.batch_size:
                self._seek(positions[run], epoch, records[run])
            else:
                self._go_on(batch, slot, positions[run], epoch, records[run])
        return records

    def _go_on(self, batch: int, slot: int, positions: np.ndarray, epoch: int, records: np.ndarray) -> None:
        """Neighboring places of one batch, before the left-overs."""
        for stream, begin, end, each, skipped in self._shares(slot, len(positions)):
            first = batch * each + skipped
            last = first + end - begin
            cursor = self._cursors[stream]
            if cursor.epoch == epoch and cursor.begin <= first and last <= cursor.end:
                records[begin:end] = cursor.records[first - cursor.begin : last - cursor.begin]
            elif cursor is _NOT_BEGUN and self._begins_singly and end - begin <= MOST_SINGLE_RECORDS:
                self._cursors[stream] = _BEGUN
                for window, places, ranks in self._blocks.windows(positions[begin:end]):
                    records[begin:end][places] = self._singly(window, ranks, epoch)
            else:
                self._seek(positions[begin:end], epoch, records[begin:end])

    def _seek(self, positions: np.ndarray, epoch: int, records: np.ndarray) -> None:
        """Any places; those of the left-overs of another worker's streams are read by themselves."""
        for window, places, ranks in self._blocks.windows(positions):
            is_left_over = positions[places.start] >= self._blocks.first_left_over
            if is_left_over and not self._windows.holds(window, epoch):
                records[places] = self._singly(window, ranks, epoch)
            else:
                held = self._windows.get(window, epoch)
                records[places] = held[ranks]
                self._cursors[window[0]] = _Cursor(epoch, *self._blocks.extent(window), held)

    def _singly(self, window: Window, ranks: np.ndarray, epoch: int) -> np.ndarray:
        return as_array(self._read_runs([(n, 1) for n in self._blocks.numbers(window, ranks, epoch).tolist()]))

    def _read_window(self, window: Window, epoch: int) -> np.ndarray:
        return as_array(self._read_runs(self._blocks.runs(window, epoch)))[self._blocks.mixing(window, epoch)]


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


def as_array(records: Sequence[bytes]) -> np.ndarray:
    """Objects, [n]; `np.asarray` would look at every byte."""
    held = np.empty(len(records), object)
    held[:] = records
    return held


def consecutive(positions: np.ndarray) -> list[slice]:
    """Where runs of consecutive numbers stand in `positions`, [n]."""
    edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [slice(begin, end) for begin, end in itertools.pairwise(edges)]
