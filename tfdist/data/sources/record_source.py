"""Sources of records that lie in files and are read in runs of neighbors.

Invariant: over an epoch a worker reads each record of its streams once, and of the others none (a stream that two
workers share, where their number does not divide the streams', is read by both). Records are held only while their
window is in use. Formats derive from `RecordSource` and say how to read a run and how to decode records.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfdist.data.order.block_order import BlockOrder
from tfdist.data.order.record_windows import WindowReader, as_array, consecutive
from tfdist.data.pipeline.failures import noted
from tfdist.data.sources.source import Order, Reader, Source, Staged
from tfdist.errors import UserError, is_whole_number

BLOCK_RECORDS = 256
Records = TypeVar("Records", np.ndarray, list[bytes])


class RecordSource(Source):
    """A source whose records are numbered through its files.

    Args:
      file_sizes: records of each file, in order; 0 is fine.
      block_records: how many neighbors stay together when the order is permuted; larger reads are cheaper, smaller
        ones mix better.
    """

    calls_python = True
    most_read_again = 0.0
    """The share of an epoch that a run may read twice, so that its first batch need not wait for more than its own
    records; 0 where to read one by itself costs much."""

    def __init__(self, file_sizes: Sequence[int], *, block_records: int = BLOCK_RECORDS) -> None:
        self.file_sizes = tuple(int(size) for size in file_sizes)
        self.num_examples = sum(self.file_sizes)
        self._file_starts = np.concatenate([[0], np.cumsum(self.file_sizes)]).astype(np.int64)
        self._block_records = block_records

    @abc.abstractmethod
    def read_run(self, file: int, first: int, count: int) -> list[bytes]:
        """Records first … first + count - 1 of a file; called by several threads at once."""

    def checked(self, records: Records) -> Records:
        """The records of a batch; raises UnreadableError where one of them could not be read."""
        return records

    @abc.abstractmethod
    def decode(self, records: tf.Tensor) -> Any:
        """The nest of a batch from string [n] records, in TensorFlow operations."""

    def has_same_batches(self, *, trains: bool) -> bool:
        del trains
        return False  # a worker opens its own files alone; their sizes are compared

    def reader(self, order: Order) -> Reader:
        fetch = self._in_order if order.seed is None else self._permuted(order)
        safe = noted(lambda positions, epoch: self.checked(fetch(positions, int(epoch))))

        def records(positions: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(safe, [positions, epoch], tf.string), [None])

        return Staged(records, self.decode)

    def block_order(self, order: Order) -> BlockOrder:
        """Where the records of an epoch stand, for an order with a seed."""
        return BlockOrder(self._block_sizes(), batch_size=order.batch_size, seed=order.seed)

    def _in_order(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        del epoch
        records: list[bytes] = []
        for run in consecutive(positions):
            records += self._read(int(positions[run.start]), run.stop - run.start)
        return as_array(records)

    def _permuted(self, order: Order) -> WindowReader:
        blocks = self.block_order(order)
        return WindowReader(
            blocks,
            read_runs=lambda runs: [record for run in runs for record in self._read(*run)],
            most_again=self.most_read_again,
        )

    def _block_sizes(self) -> tuple[int, ...]:
        """Every file in blocks of as equal a size as can be, at most `block_records`."""
        sizes: list[int] = []
        for size in self.file_sizes:
            count = -(-size // self._block_records)
            sizes += [size * (i + 1) // count - size * i // count for i in range(count)]
        return tuple(sizes)

    def _read(self, first: int, count: int) -> list[bytes]:
        """Records by their number in the whole source."""
        records: list[bytes] = []
        while count:
            file = int(np.searchsorted(self._file_starts, first, side="right")) - 1
            here = min(count, int(self._file_starts[file + 1]) - first)
            records += self.read_run(file, first - int(self._file_starts[file]), here)
            first, count = first + here, count - here
        return records


def checked_block_records(given: int | None, *, otherwise: int) -> int:
    """The user's `block_records`, or `otherwise`; raises UserError where it is no whole number of at least 1."""
    if given is None:
        return otherwise
    if not is_whole_number(given):
        raise UserError(f"block_records is a whole number of at least 1; received {given!r}.")
    return given
