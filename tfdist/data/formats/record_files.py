"""Records of TFRecord files by their number: a run of neighbors is one read of exactly its bytes.

Every record's checksum is verified. Formats derive from `RecordFileSource`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from tfdist.data.formats.input_files import file_version
from tfdist.data.formats.record_index import (
    FOOTER_BYTES,
    HEADER_BYTES,
    RecordIndex,
    load_index,
    masked,
)
from tfdist.data.order.block_order import BlockOrder, Run, WindowReader, as_array
from tfdist.data.sources.failures import noted
from tfdist.data.sources.source import Order, Reader, Source, Staged
from tfdist.errors import UnreadableError, UserError
from tfdist.settings.checks import COUNT
from tfdist.storage import files

# A worker holds some 200 blocks at a time (`block_order.py`), so blocks of large records hold fewer of them.
BLOCK_BYTES = 1 << 20
LEAST_BLOCK_RECORDS = 8
MOST_BLOCK_RECORDS = 256


class RecordFile:
    """A TFRecord file. Making one looks at its size, no more; the index is loaded when it is first needed.

    Args:
      path: local or gs://.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.version = file_version(path)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self.version.num_bytes

    @functools.cached_property
    def index(self) -> RecordIndex:
        with self._lock:
            return load_index(self.version)

    def read(self, first: int, count: int) -> tuple[list[bytes], list[int]]:
        """Records first … first + count - 1, and the numbers of those whose checksum is wrong."""
        offsets = self.index.offsets[first : first + count + 1]
        begin, size = int(offsets[0]), int(offsets[-1] - offsets[0])
        data = files.read_range(self.path, begin, size)
        if len(data) < size:
            raise UserError(f"{self.path} became shorter while it was read, at record {first}. Make it again.")
        starts, stops = offsets[:-1] - begin + HEADER_BYTES, offsets[1:] - begin - FOOTER_BYTES
        records = [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        computed = masked(np.fromiter(map(google_crc32c.value, records), np.uint32, count))
        footers = np.frombuffer(data, np.uint8)[stops[:, np.newaxis] + np.arange(FOOTER_BYTES)]
        wrong = np.nonzero(footers.view("<u4")[:, 0] != computed)[0]
        return records, (wrong + first).tolist()


class Unreadable(bytes):
    """In the place of a record that cannot be read, until a batch wants it; other batches may be of the same run."""

    error: UnreadableError


@dataclasses.dataclass(frozen=True)
class FilePart:
    """Records skip … skip + take - 1 of a file."""

    file: RecordFile
    skip: int
    take: int


class RecordFileSource(Source):
    """A source of parts of TFRecord files; formats of records say how to `decode`.

    Over an epoch a worker reads each record of its streams once, and of the others none (a stream that two workers
    share, where their number does not divide the streams', is read by both).

    Args:
      parts: in the order of the records.
      record_bytes: about the size of a record.
      block_records: how many neighbors stay together when the order is permuted; larger reads are cheaper, smaller
        ones mix better. None takes what makes a megabyte.
    """

    calls_python = True

    def __init__(self, parts: Sequence[FilePart], *, record_bytes: float, block_records: int | None = None) -> None:
        if block_records is None:
            block_records = min(MOST_BLOCK_RECORDS, max(LEAST_BLOCK_RECORDS, int(BLOCK_BYTES / max(1.0, record_bytes))))
        COUNT("block_records", block_records)
        self.parts = tuple(parts)
        self.file_sizes = tuple(part.take for part in parts)  # which workers compare
        self.num_examples = sum(self.file_sizes)
        self.waits = any(files.is_remote(part.file.path) for part in parts)
        self._part_starts = np.cumsum([0, *self.file_sizes])
        self._block_records = block_records
        self._has_unreadable = False

    @abc.abstractmethod
    def decode(self, records: tf.Tensor) -> Any:
        """The nest of a batch from string [n] records, in TensorFlow operations."""

    def has_same_batches(self, *, trains: bool) -> bool:
        del trains
        return False  # a worker opens its own files alone; their sizes are compared

    def reader(self, order: Order) -> Reader:
        if order.seed is None:
            fetch: Callable[[np.ndarray, int], np.ndarray] = self._read_in_order
        else:
            blocks = BlockOrder(self.num_examples, self._block_records, order.batch_size, order.seed)
            fetch = WindowReader(blocks, self._read_runs)
        safe = noted(lambda positions, epoch: self._checked(fetch(positions, int(epoch))))

        def records(positions: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(safe, [positions, epoch], tf.string), [None])

        return Staged(records, self.decode)

    def read_run(self, number: int, first: int, count: int) -> list[bytes]:
        """Records first … first + count - 1 of a part; called by several threads at once."""
        part = self.parts[number]
        self._check_whole(part)
        records, wrong = part.file.read(part.skip + first, count)
        for place in wrong:
            records[place - part.skip - first] = unreadable = Unreadable()
            unreadable.error = UnreadableError(describe_corrupt(part.file, place, "its checksum is wrong"))
            self._has_unreadable = True
        return records

    def describe(self) -> list[str]:
        found = {part.file.path: part.file for part in self.parts}
        empty = self.file_sizes.count(0)
        said = f" ({empty} empty)" if empty else ""
        return [
            f"{len(found):,} file{'s' if len(found) != 1 else ''}{said}, {self.num_examples:,} records, "
            f"{sum(file.num_bytes for file in found.values()):,} bytes"
        ]

    def _read_in_order(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        del epoch
        edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
        runs = [(int(positions[begin]), end - begin) for begin, end in itertools.pairwise(edges) if begin < end]
        return as_array(self._read_runs(runs))

    def _read_runs(self, runs: Sequence[Run]) -> list[bytes]:
        """Runs of records, (first, count), by their numbers in the whole source."""
        records: list[bytes] = []
        for first, count in runs:
            while count:
                number = int(np.searchsorted(self._part_starts, first, side="right")) - 1
                here = min(count, int(self._part_starts[number + 1]) - first)
                records += self.read_run(number, first - int(self._part_starts[number]), here)
                first, count = first + here, count - here
        return records

    def _checked(self, records: np.ndarray) -> np.ndarray:
        """The records of a batch; raises UnreadableError where one of them could not be read."""
        if self._has_unreadable:
            for record in records:
                if isinstance(record, Unreadable):
                    raise record.error
        return records

    def _check_whole(self, part: FilePart) -> None:
        index = part.file.index
        if part.skip + part.take > index.num_records:
            raise UserError(
                f"{part.file.path} holds {index.num_records:,} whole records, where at least "
                f"{part.skip + part.take:,} belong: it was cut short after record {index.num_records - 1}. "
                "Make the file again."
            )


def describe_corrupt(file: RecordFile, number: int, problem: str) -> str:
    """Returns the message about a corrupt record of a file."""
    return f"Record {number} of {file.path} is corrupt: {problem}. Make the file again."
