"""Where the records of a TFRecord file begin: found once, by reading headers only, and kept in the user's cache.

A record is a length (8 bytes), that length's checksum (4), the data, the data's checksum (4); see
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. Checksums are CRC-32C, masked.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from collections.abc import Callable

import google_crc32c
import numpy as np

from tfdist.data.cache.index_cache import cached
from tfdist.data.formats.byte_ranges import FileVersion, read_range
from tfdist.data.formats.compressed_file import CompressedFile
from tfdist.errors import UserError
from tfdist.storage import files

HEADER_BYTES = 12
READ_AHEAD_BYTES = 1 << 22  # of an object: a request costs as much as some megabytes
FOOTER_BYTES = 4
INDEX_VERSION = "tfrecord 1"
_HEADER = struct.Struct("<QI")
_MASK = 0xA282EAD8


@dataclasses.dataclass(frozen=True, eq=False)
class RecordIndex:
    """Where the whole records of a file lie.

    Attributes:
      offsets: int64 [n + 1], the byte at which each record's header begins, and the end of the last record.
      tail_bytes: bytes after the last whole record: of one that was cut short. Of a compressed file, unpacked ones.
    """

    offsets: np.ndarray
    tail_bytes: int

    @property
    def num_records(self) -> int:
        return len(self.offsets) - 1


def masked(crc: np.ndarray) -> np.ndarray:
    """The form in which TFRecord files store checksums, uint32 [n]."""
    crc = crc.astype(np.uint32)
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK)


def find_compression(version: FileVersion) -> str | None:
    """ "GZIP" or "ZLIB" by the first bytes of a file; None where it is not compressed.

    Raises:
      UserError: it is no TFRecord file.
    """
    head = read_range(version.path, 0, HEADER_BYTES)
    if len(head) < 2 or (len(head) == HEADER_BYTES and _length(head) is not None):
        return None
    if head[:2] == b"\x1f\x8b":
        return "GZIP"
    if head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0:
        return "ZLIB"
    raise UserError(
        f"{version.path} is not a TFRecord file, or record 0 of it is corrupt: it begins with {head!r}, which is no "
        "record header and no gzip or zlib stream."
    )


def load_index(version: FileVersion, compressed: CompressedFile | None) -> RecordIndex:
    """The index of a file, from the cache or made now.

    Raises:
      UserError: a record's length is corrupt, so that what follows cannot be found.
    """

    def make() -> dict[str, np.ndarray]:
        index = _make_index(version, compressed)
        return {"offsets": index.offsets, "tail_bytes": np.asarray(index.tail_bytes)}

    packing = compressed.compression if compressed is not None else "not compressed"
    held = cached(version, f"{INDEX_VERSION}, {packing}", make)
    return RecordIndex(held["offsets"], int(held["tail_bytes"]))


def _make_index(version: FileVersion, compressed: CompressedFile | None) -> RecordIndex:
    if compressed is not None:
        found = _scan(version.path, lambda at: compressed.read(at, HEADER_BYTES), None)
        end = compressed.reached
        if compressed.problem is not None and version.num_bytes:
            if len(found) < 2:
                raise UserError(f"{version.path} cannot be unpacked as {compressed.compression}: {compressed.problem}.")
            end += found[-1] == end  # something is missing, however little
    elif version.num_bytes == 0:
        return RecordIndex(np.zeros(1, np.int64), 0)
    elif files.is_remote(version.path):
        ahead = _ReadAhead(version.path)
        found = _scan(version.path, lambda at: ahead.read(at, HEADER_BYTES), version.num_bytes)
        end = version.num_bytes
    else:
        with open(version.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            view.madvise(mmap.MADV_RANDOM)  # no read-ahead: only headers are wanted
            found = _scan(version.path, lambda at: view[at : at + HEADER_BYTES], version.num_bytes)
        end = version.num_bytes
    if found[-1] > end:  # the last record's header is whole, its data is not
        found.pop()
    return RecordIndex(np.asarray(found, np.int64), end - found[-1])


class _ReadAhead:
    """Ranges of a remote file that are asked for in ascending order, of which a request brings many."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._first, self._data = 0, b""

    def read(self, first: int, count: int) -> bytes:
        at = first - self._first
        if not 0 <= at <= len(self._data) - count:
            self._first, self._data, at = first, read_range(self._path, first, READ_AHEAD_BYTES), 0
        return self._data[at : at + count]


def _scan(path: str, header_at: Callable[[int], bytes], end: int | None) -> list[int]:
    """Where records begin, from one header to the next; the last may lie beyond the end."""
    found, position = [0], 0
    while (end is None or position < end) and len(head := header_at(position)) == HEADER_BYTES:
        length = _length(head)
        if length is None:
            raise UserError(
                f"Record {len(found) - 1} of {path} is corrupt: the checksum of its length is wrong, at byte "
                f"{position:,}, so that what follows cannot be found. Make the file again, or leave it out."
            )
        position += HEADER_BYTES + length + FOOTER_BYTES
        found.append(position)
    return found


def _length(head: bytes) -> int | None:
    """The length in a header; None where its checksum is wrong."""
    length, stored = _HEADER.unpack(head)
    crc = google_crc32c.value(head[:8])
    expected = (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
    return length if stored == expected else None
