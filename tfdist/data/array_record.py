"""Records of ArrayRecord files, any of which can be read by its number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.byte_ranges import file_version
from tfdist.data.failures import noted
from tfdist.data.identity import digest
from tfdist.data.source import RandomAccessSource
from tfdist.errors import UserError, missing_extra

# One record a read, without its neighbours (though up to the next multiple of 4,096 bytes, which cannot be set), and of
# the footer what is needed in place of a megabyte a file.
READER_OPTIONS = "readahead_buffer_size:0,footer_prefetch_bytes:0"


class ArrayRecordSource(RandomAccessSource):
    """Records of several files, each permuted among all others.

    Args:
      parts: path, first record and number of records, file by file.
      decode: from string [n] records to the nest of a batch.
      structure: of that nest.
      decoded_by: what `decode` depends on, for `identity`.
    """

    calls_python = True

    def __init__(
        self,
        parts: Sequence[tuple[str, int, int]],
        decode: Callable[[tf.Tensor], Any],
        structure: Any,
        decoded_by: Any = None,
    ) -> None:
        self._parts = tuple(parts)
        self._starts = np.concatenate([[0], np.cumsum([take for _, _, take in parts])]).astype(np.int64)
        self._decode = decode
        self._decoded_by = decoded_by
        self._readers: dict[int, Any] = {}
        self._lock = threading.Lock()
        self.num_examples = int(self._starts[-1])
        self.structure = structure

    def gatherer(self) -> Callable[[tf.Tensor], Any]:
        safe = noted(lambda indices: np.asarray(self._read(indices), dtype=object))

        def gather(indices: tf.Tensor) -> Any:
            records = tf.numpy_function(safe, [indices], tf.string)
            return self._decode(tf.ensure_shape(records, [None]))

        return gather

    def identity(self) -> str:
        versions = [(file_version(path), skip, take) for path, skip, take in self._parts]
        return digest("array_record", versions, self._decoded_by, None if self._decoded_by else self._decode)

    def describe(self) -> list[str]:
        return [f"{len(self._parts):,} ArrayRecord files, {self.num_examples:,} records, read one by one"]

    def _read(self, indices: np.ndarray) -> list[bytes]:
        files = np.searchsorted(self._starts, indices, side="right") - 1
        records: list[bytes] = [b""] * len(indices)
        for file in np.unique(files).tolist():
            path, skip, _ = self._parts[file]
            places = np.nonzero(files == file)[0]
            numbers = (indices[places] - self._starts[file] + skip).tolist()
            try:
                with self._lock:  # a reader keeps a position of its own
                    found = self._reader(file).read(numbers)
            except (RuntimeError, ValueError, IndexError) as error:
                raise UserError(
                    f"{path} is cut short or corrupt: records {numbers[:3]} … do not read: {error}"
                ) from error
            for place, record in zip(places.tolist(), found, strict=True):
                records[place] = record
        return records

    def _reader(self, file: int) -> Any:
        if file not in self._readers:
            try:
                from array_record.python.array_record_module import ArrayRecordReader
            except ImportError as error:
                raise missing_extra("array_record", "tfds", "An ArrayRecord file") from error
            self._readers[file] = ArrayRecordReader(self._parts[file][0], READER_OPTIONS)
        return self._readers[file]
