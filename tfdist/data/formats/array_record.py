"""Records of ArrayRecord files by their number: a run of neighbors is one read.

The library's reader continues to the next multiple of 4,096 bytes, so that small records read one by one cost several
times their size; runs cost their size, and each file its own table of where records lie, some 6 bytes a record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.sources.record_source import RecordSource, checked_block_records
from tfdist.errors import UserError, missing_extra

# A run is read in pieces of so many bytes, and nothing beyond its end. Of the footer only what is needed, in place of a
# megabyte a file.
READER_OPTIONS = "readahead_buffer_size:262144,footer_prefetch_bytes:0"
# What a block may go beyond its end is 1 % of this.
BLOCK_BYTES = 1 << 18
MOST_BLOCK_RECORDS = 256


class ArrayRecordSource(RecordSource):
    """Records of several files, permuted by blocks; large records are blocks of their own.

    Args:
      parts: path, first record and number of records, file by file.
      decode: from string [n] records to the nest of a batch.
      structure: of that nest.
      record_bytes: about the size of a record.
      block_records: as in `RecordSource`; None takes what makes a quarter of a megabyte, 256 at most.

    Raises:
      UserError: block_records is no whole number of at least 1.
    """

    most_read_again = 0.002  # of records that cost more than twice their size

    def __init__(
        self,
        parts: Sequence[tuple[str, int, int]],
        decode: Callable[[tf.Tensor], Any],
        structure: Any,
        *,
        record_bytes: float,
        block_records: int | None = None,
    ) -> None:
        fitting = min(MOST_BLOCK_RECORDS, max(1, round(BLOCK_BYTES / max(1.0, record_bytes))))
        super().__init__(
            [take for _, _, take in parts], block_records=checked_block_records(block_records, otherwise=fitting)
        )
        self._parts = tuple(parts)
        self._decode = decode
        self._readers: dict[int, Any] = {}
        self._lock = threading.Lock()
        self.structure = structure

    def decode(self, records: tf.Tensor) -> Any:
        return self._decode(records)

    def read_run(self, file: int, first: int, count: int) -> list[bytes]:
        """Records first … first + count - 1 of a part.

        Raises:
          UserError: the file is cut short or corrupt, or the library is missing.
        """
        path, skip, _ = self._parts[file]
        begin, end = skip + first, skip + first + count
        try:
            with self._lock:  # a reader keeps a position of its own
                return self._reader(file).read(begin, end)
        except (RuntimeError, ValueError, IndexError) as error:
            raise UserError(
                f"{path} is cut short or corrupt: records {begin} … {end - 1} do not read: {error}"
            ) from error

    def describe(self) -> list[str]:
        return [f"{len(self._parts):,} ArrayRecord files, {self.num_examples:,} records"]

    def _reader(self, file: int) -> Any:
        if file not in self._readers:
            try:
                from array_record.python.array_record_module import ArrayRecordReader
            except ImportError as error:
                raise missing_extra("array_record", "tfds", "An ArrayRecord file") from error
            self._readers[file] = ArrayRecordReader(self._parts[file][0], READER_OPTIONS)
        return self._readers[file]
