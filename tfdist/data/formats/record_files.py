"""Records of TFRecord files by their number: a run of neighbors is one read of exactly its bytes.

A record is a length (8 bytes), that length's checksum (4), the data, the data's checksum (4); see
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. Checksums are CRC-32C, masked; every
one is verified. Where records begin is found once, from header to header, and kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from tfdist.data.formats.block_order import BlockOrder, Run, WindowReader, as_array
from tfdist.data.sources.failures import call_python
from tfdist.data.sources.source import Order, Reader, Source, StagedReader, trace_structure
from tfdist.errors import UnreadableError, UserError
from tfdist.settings.checks import COUNT
from tfdist.storage import files
from tfdist.storage.contents import FileVersion
from tfdist.strategies.cluster import environment

# A worker holds some 200 blocks at a time (`block_order.py`), so blocks of large records hold fewer of them.
BLOCK_BYTES = 1 << 20
MIN_BLOCK_RECORDS = 8
MAX_BLOCK_RECORDS = 256
HEADER_BYTES = 12
# Read at a time while headers are looked for; of an object a request costs as much as some megabytes.
LOCAL_AHEAD_BYTES, REMOTE_AHEAD_BYTES = 1 << 13, 1 << 22
FOOTER_BYTES = 4
INDEX_VERSION = "tfrecord 3"
_HEADER = struct.Struct("<QI")
_MASK = 0xA282EAD8


class RecordFile:
    """A TFRecord file, whose index is loaded when it is first needed."""

    def __init__(self, version: FileVersion) -> None:
        self.path = version.path
        self.version = version
        self._lock = threading.Lock()  # of this file alone: several are indexed at a time
        self._offsets: np.ndarray | None = None

    @property
    def offsets(self) -> np.ndarray:
        """The bounds of the whole records, int64 [n + 1]."""
        with self._lock:
            if self._offsets is None:
                self._offsets = load_index(self.version)
            return self._offsets

    @property
    def num_records(self) -> int:
        """Whole records."""
        return len(self.offsets) - 1

    def read(self, first: int, count: int) -> list[bytes]:
        """Records first … first + count - 1; raises UnreadableError where the checksum of one is wrong."""
        offsets = self.offsets[first : first + count + 1]
        begin, size = int(offsets[0]), int(offsets[-1] - offsets[0])
        data = files.read_range(self.path, begin, size)
        if len(data) < size:
            raise UserError(f"{self.path} became shorter while it was read, at record {first}. Make it again.")
        starts, stops = offsets[:-1] - begin + HEADER_BYTES, offsets[1:] - begin - FOOTER_BYTES
        records = [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        computed = _mask(np.fromiter(map(google_crc32c.value, records), np.uint32, count))
        footers = np.frombuffer(data, np.uint8)[stops[:, np.newaxis] + np.arange(FOOTER_BYTES)]
        wrong = np.nonzero(footers.view("<u4")[:, 0] != computed)[0]
        if len(wrong):
            raise UnreadableError(describe_corrupt(self, first + int(wrong[0]), "its checksum is wrong"))
        return records


@dataclasses.dataclass(frozen=True)
class FilePart:
    """Records skip … skip + take - 1 of a file."""

    file: RecordFile
    skip: int
    take: int


class RecordFileSource(Source):
    """A source of parts of TFRecord files.

    Over an epoch a worker reads each record of its streams once, and of the others none (a stream that two workers
    share, where their number does not divide the streams', is read by both).

    Args:
      parts: in the order of the records.
      decode: gives the nest of a batch from string [n] records, in TensorFlow operations.
      record_bytes: about the size of a record.
      block_records: how many neighbors stay together when the order is permuted; larger reads are cheaper, smaller
        ones mix better. None takes what makes a megabyte.
    """

    calls_python = True
    has_same_batches = False  # a worker opens its own files alone; their sizes are compared

    def __init__(
        self,
        parts: Sequence[FilePart],
        decode: Callable[[tf.Tensor], Any],
        *,
        record_bytes: float,
        block_records: int | None,
    ) -> None:
        if block_records is None:
            block_records = min(MAX_BLOCK_RECORDS, max(MIN_BLOCK_RECORDS, int(BLOCK_BYTES / max(1.0, record_bytes))))
        COUNT("block_records", block_records)
        self.structure = trace_structure(decode, tf.TensorSpec([None], tf.string))
        self.parts = tuple(parts)
        self._decode = decode
        self.file_sizes = tuple(part.take for part in parts)
        self.num_examples = sum(self.file_sizes)
        self.waits = any(files.is_remote(part.file.path) for part in parts)
        self._part_starts = np.cumsum([0, *self.file_sizes])
        self._block_records = block_records

    def reader(self, order: Order) -> Reader:
        """Reads windows of blocks where there is a seed, else runs of neighbors."""
        if order.seed is None:
            fetch: Callable[[np.ndarray, int], np.ndarray] = self._read_in_order
        else:
            blocks = BlockOrder(self.num_examples, self._block_records, order.batch_size, order.seed)
            fetch = WindowReader(blocks, self._read_runs)
        spec = tf.TensorSpec([None], tf.string)

        def read_records(positions: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
            return call_python(lambda positions, epoch: fetch(positions, int(epoch)), [positions, epoch], spec)

        return StagedReader(read_records, self._decode)

    def read_run(self, number: int, first: int, count: int) -> list[bytes]:
        """Records first … first + count - 1 of a part; called by several threads at once."""
        part = self.parts[number]
        num_records = part.file.num_records
        if part.skip + part.take > num_records:
            raise UserError(
                f"{part.file.path} holds {num_records:,} whole records, where at least {part.skip + part.take:,} "
                f"belong: it was cut short after record {num_records - 1}. Make the file again."
            )
        return part.file.read(part.skip + first, count)

    def describe(self) -> list[str]:
        """Counts files, records and bytes."""
        found = {part.file.path: part.file for part in self.parts}
        empty = self.file_sizes.count(0)
        said = f" ({empty} empty)" if empty else ""
        return [
            f"{len(found):,} file{'s' if len(found) != 1 else ''}{said}, {self.num_examples:,} records, "
            f"{sum(file.version.num_bytes for file in found.values()):,} bytes"
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


def describe_corrupt(file: RecordFile, number: int, problem: str) -> str:
    """Returns the message about a corrupt record of a file."""
    return f"Record {number} of {file.path} is corrupt: {problem}. Make the file again."


def load_index(version: FileVersion) -> np.ndarray:
    """Loads the bounds of a file's whole records, int64 [n + 1], from the cache, or finds them.

    Raises:
      UserError: it is not a TFRecord file, or a record's length is corrupt, so that what follows cannot be found.
    """
    path = version.path if files.is_remote(version.path) else os.path.abspath(version.path)
    identity = "\n".join([path, str(version.num_bytes), str(version.changed_nanoseconds), INDEX_VERSION])
    folder = os.path.join(environment.cache_directory(), "index")
    entry = os.path.join(folder, f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npy")
    with contextlib.suppress(OSError, ValueError, EOFError):  # not there, or torn
        return np.load(entry, allow_pickle=False)
    offsets = _find_records(version)
    packed = io.BytesIO()
    np.save(packed, offsets)
    with contextlib.suppress(OSError):  # a read-only home: scanned again next time
        files.make_dirs(folder)
        files.write_atomic(entry, packed.getvalue())
    return offsets


def _find_records(version: FileVersion) -> np.ndarray:
    """Finds the bounds of the whole records, int64 [n + 1], from one header to the next."""
    path, end = version.path, version.num_bytes
    ahead = REMOTE_AHEAD_BYTES if files.is_remote(path) else LOCAL_AHEAD_BYTES
    bounds, data, first = [0], b"", 0
    while (position := bounds[-1]) < end:
        if position + HEADER_BYTES > first + len(data):
            data, first = files.read_range(path, position, ahead), position
        head = data[position - first : position - first + HEADER_BYTES]
        if len(head) < HEADER_BYTES:
            break
        length = _read_length(head)
        if length is None and position == 0:
            raise _foreign_file_error(path, head)
        if length is None:
            raise UserError(
                f"Record {len(bounds) - 1} of {path} is corrupt: the checksum of its length is wrong, at byte "
                f"{position:,}, so that what follows cannot be found. Make the file again, or leave it out."
            )
        bounds.append(position + HEADER_BYTES + length + FOOTER_BYTES)
    if bounds[-1] > end:  # the last record's header is whole, its data is not
        bounds.pop()
    return np.asarray(bounds, np.int64)


def _foreign_file_error(path: str, head: bytes) -> UserError:
    if head[:2] == b"\x1f\x8b" or (head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0):
        return UserError(
            f"{path} is compressed, by gzip or zlib, and cannot be read by ranges. Unpack it once, or read it with "
            "tf.data.TFRecordDataset(…, compression_type='GZIP') in a user_dataset.DatasetFunction."
        )
    return UserError(
        f"{path} is not a TFRecord file, or record 0 of it is corrupt: it begins with {head!r}, which is not a record "
        "header."
    )


def _read_length(head: bytes) -> int | None:
    """The length in a header; None where its checksum is wrong."""
    length, stored = _HEADER.unpack(head)
    crc = google_crc32c.value(head[:8])
    expected = (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
    return length if stored == expected else None


def _mask(crc: np.ndarray) -> np.ndarray:
    """The form in which TFRecord files store checksums, uint32 [n]."""
    crc = crc.astype(np.uint32)
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK)
