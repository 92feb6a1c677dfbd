"""Where the records of a TFRecord file begin: found once, by reading headers only, and kept in the user's cache.

A record is a length (8 bytes), that length's checksum (4), the data, the data's checksum (4); see
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. Checksums are CRC-32C, masked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import mmap
import os
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.contents import FileVersion
from tfdist.strategies.cluster import environment

HEADER_BYTES = 12
READ_AHEAD_BYTES = 1 << 22  # of an object: a request costs as much as some megabytes
FOOTER_BYTES = 4
INDEX_VERSION = "tfrecord 2"
_HEADER = struct.Struct("<QI")
_MASK = 0xA282EAD8


@dataclasses.dataclass(frozen=True, eq=False)
class RecordIndex:
    """Where the whole records of a file lie.

    Attributes:
      offsets: int64 [n + 1], the byte at which each record's header begins, and the end of the last record.
      tail_bytes: bytes after the last whole record: of one that was cut short.
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


def load_index(version: FileVersion) -> RecordIndex:
    """The index of a file, from the cache or made now.

    Raises:
      UserError: it is not a TFRecord file, or a record's length is corrupt, so that what follows cannot be found.
    """

    def make() -> dict[str, np.ndarray]:
        index = _make_index(version)
        return {"offsets": index.offsets, "tail_bytes": np.asarray(index.tail_bytes)}

    held = cached(version, INDEX_VERSION, make)
    return RecordIndex(held["offsets"], int(held["tail_bytes"]))


def _make_index(version: FileVersion) -> RecordIndex:
    end = version.num_bytes
    if end == 0:
        return RecordIndex(np.zeros(1, np.int64), 0)
    if files.is_remote(version.path):
        ahead = _ReadAhead(version.path)
        found = _scan(version.path, lambda at: ahead.read(at, HEADER_BYTES), end)
    else:
        with open(version.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            view.madvise(mmap.MADV_RANDOM)  # no read-ahead: only headers are wanted
            found = _scan(version.path, lambda at: view[at : at + HEADER_BYTES], end)
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
            self._first, self._data, at = first, files.read_range(self._path, first, READ_AHEAD_BYTES), 0
        return self._data[at : at + count]


def _scan(path: str, header_at: Callable[[int], bytes], end: int) -> list[int]:
    """Where records begin, from one header to the next; the last may lie beyond the end."""
    found, position = [0], 0
    while position < end and len(head := header_at(position)) == HEADER_BYTES:
        length = _length(head)
        if length is None and position == 0:
            raise _not_records(path, head)
        if length is None:
            raise UserError(
                f"Record {len(found) - 1} of {path} is corrupt: the checksum of its length is wrong, at byte "
                f"{position:,}, so that what follows cannot be found. Make the file again, or leave it out."
            )
        position += HEADER_BYTES + length + FOOTER_BYTES
        found.append(position)
    return found


def _not_records(path: str, head: bytes) -> UserError:
    if head[:2] == b"\x1f\x8b" or (head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0):
        return UserError(
            f"{path} is compressed, by gzip or zlib, and cannot be read by ranges. Unpack it once, or read it with "
            "tf.data.TFRecordDataset(…, compression_type='GZIP') in a user_dataset.DatasetFunction."
        )
    return UserError(
        f"{path} is not a TFRecord file, or record 0 of it is corrupt: it begins with {head!r}, which is not a record "
        "header."
    )


def _length(head: bytes) -> int | None:
    """The length in a header; None where its checksum is wrong."""
    length, stored = _HEADER.unpack(head)
    crc = google_crc32c.value(head[:8])
    expected = (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
    return length if stored == expected else None


Arrays = dict[str, np.ndarray]


def cached(file: FileVersion, settings: str, make: Callable[[], Arrays]) -> Arrays:
    """What `make` gave for this file and these settings, now or in an earlier run.

    Args:
      file: the file that is scanned.
      settings: all else that the result depends on, with a version of the format in it.
      make: scans the file; its arrays hold no Python objects.
    """
    path = file.path if files.is_remote(file.path) else os.path.abspath(file.path)
    identity = "\n".join([path, str(file.num_bytes), str(file.changed_nanoseconds), settings])
    entry = os.path.join(_directory(), f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz")
    try:
        with np.load(entry, allow_pickle=False) as held:
            return dict(held)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        pass  # not there, or torn
    arrays: dict[str, Any] = make()
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    try:
        files.make_dirs(os.path.dirname(entry))
        files.write_atomic(entry, packed.getvalue())
    except OSError:
        pass  # a read-only home: scanned again next time
    return arrays


def _directory() -> str:
    return os.path.join(environment.cache_directory(), "index")
