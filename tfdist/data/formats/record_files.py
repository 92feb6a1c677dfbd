"""Records of TFRecord files by their number: a run of neighbors is one read of exactly its bytes.

Every record's checksum is verified. Used by the sources of TFRecord files.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence

import google_crc32c
import numpy as np

from tfdist.data.formats.byte_ranges import file_version, read_into, read_range
from tfdist.data.formats.record_index import (
    FOOTER_BYTES,
    HEADER_BYTES,
    RecordIndex,
    load_index,
    masked,
)
from tfdist.data.sources.record_source import Records, RecordSource, checked_block_records
from tfdist.errors import UnreadableError, UserError
from tfdist.storage import files

# A worker holds some 200 blocks at a time (`block_order.py`), so blocks of large records hold fewer of them.
BLOCK_BYTES = 1 << 20
LEAST_BLOCK_RECORDS = 8
MOST_BLOCK_RECORDS = 256
MOST_SCRATCH_BYTES = 1 << 22
_SCRATCH = threading.local()


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
        data = self._bytes(begin, size)
        if len(data) < size:
            raise UserError(f"{self.path} became shorter while it was read, at record {first}. Make it again.")
        starts, stops = offsets[:-1] - begin + HEADER_BYTES, offsets[1:] - begin - FOOTER_BYTES
        records = [bytes(data[start:stop]) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        computed = masked(np.fromiter(map(google_crc32c.value, records), np.uint32, count))
        footers = np.frombuffer(data, np.uint8)[stops[:, np.newaxis] + np.arange(FOOTER_BYTES)]
        wrong = np.nonzero(footers.view("<u4")[:, 0] != computed)[0]
        return records, (wrong + first).tolist()

    def _bytes(self, begin: int, size: int) -> memoryview:
        """So many bytes of what the file holds, or fewer where it ends before; valid until the thread reads again."""
        if files.is_remote(self.path) or size > MOST_SCRATCH_BYTES:
            return memoryview(read_range(self.path, begin, size))
        # Memory that was in use a moment ago: fresh memory for each run costs more than reading into it.
        if len(held := getattr(_SCRATCH, "bytes", b"")) < size:
            held = _SCRATCH.bytes = bytearray(min(MOST_SCRATCH_BYTES, 2 * size))
        view = memoryview(held)[:size]
        return view if read_into(self.path, view, first=begin) else view[:0]


class Unreadable(bytes):
    """In the place of a record that cannot be read, until a batch wants it; other batches may be of the same run."""

    error: UnreadableError


@dataclasses.dataclass(frozen=True)
class FilePart:
    """Records skip … skip + take - 1 of a file."""

    file: RecordFile
    skip: int
    take: int


class RecordFileSource(RecordSource):
    """A source of parts of TFRecord files; formats of records say how to `decode`.

    Args:
      parts: in the order of the records.
      block_records: as in `RecordSource`; None takes what makes a megabyte.
      record_bytes: about the size of a record.
    """

    def __init__(
        self,
        parts: Sequence[FilePart],
        *,
        record_bytes: float,
        block_records: int | None = None,
    ) -> None:
        fitting = min(MOST_BLOCK_RECORDS, max(LEAST_BLOCK_RECORDS, int(BLOCK_BYTES / max(1.0, record_bytes))))
        block_records = checked_block_records(block_records, otherwise=fitting)
        super().__init__([part.take for part in parts], block_records=block_records)
        self.parts = tuple(parts)
        self.waits = any(files.is_remote(part.file.path) for part in parts)
        self.most_read_again = 0.0 if self.waits else 0.005
        self._has_unreadable = False

    def read_run(self, file: int, first: int, count: int) -> list[bytes]:
        part = self.parts[file]
        self._check_whole(part)
        records, wrong = part.file.read(part.skip + first, count)
        for number in wrong:
            records[number - part.skip - first] = unreadable = Unreadable()
            unreadable.error = UnreadableError(describe_corrupt(part.file, number, "its checksum is wrong"))
            self._has_unreadable = True
        return records

    def checked(self, records: Records) -> Records:
        if self._has_unreadable:
            for record in records:
                if isinstance(record, Unreadable):
                    raise record.error
        return records

    def describe(self) -> list[str]:
        found = {part.file.path: part.file for part in self.parts}
        empty = sum(size == 0 for size in self.file_sizes)
        said = f" ({empty} empty)" if empty else ""
        return [
            f"{len(found):,} file{'s' if len(found) != 1 else ''}{said}, {self.num_examples:,} records, "
            f"{sum(file.num_bytes for file in found.values()):,} bytes"
        ]

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
