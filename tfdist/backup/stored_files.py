"""Reads the data files of one backup into arrays, verifying them on the way.

Invariant: size and CRC32C of every file are found right on the very bytes that become the arrays, before any of them
is handed out. The bytes are read once, into memory that nobody else has. Catalog and restore read through this.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from tfdist.backup import packing, tensor_files
from tfdist.backup.checksum import crc32c, joined
from tfdist.backup.manifest import DamagedBackup, Manifest, StoredFile
from tfdist.storage import contents, files

_MOST_FILES = 8  # at once
_READERS = 2  # of local files
_SEGMENT_BYTES = 2 * 2**20  # what one of them takes at a time
_PIECE_BYTES = 2**18  # checksummed while the processor's cache still has it


def read_files(path: str, manifest: Manifest, *, verify: bool = True) -> dict[str, np.ndarray]:
    """The tensors of the backup at `path`, not to be written to.

    Raises:
      DamagedBackup: naming the file and what was wrong with it.
      OSError: the store does not answer.
    """
    count = max(1, min(_MOST_FILES, len(manifest.files)))
    with ThreadPoolExecutor(count, "tfdist-restore") as threads, ThreadPoolExecutor(_READERS, "tfdist-read") as readers:
        read = [threads.submit(_read_file, path, file, verify, readers) for file in manifest.files]
        tensors = {name: array for future in read for name, array in future.result().items()}
    if len(tensors) != manifest.num_tensors:
        raise DamagedBackup(f"its files hold {len(tensors):,} tensors instead of {manifest.num_tensors:,}")
    return tensors


def _read_file(path: str, file: StoredFile, verify: bool, readers: ThreadPoolExecutor) -> dict[str, np.ndarray]:
    try:
        data, found = _bytes_of(files.join(path, file.name), file.num_bytes, verify, readers)
        if verify and found != file.crc32c:
            raise DamagedBackup(f"its checksum is {found:08x} instead of {file.crc32c:08x}")
        return tensor_files.read(packing.unpack(memoryview(data).toreadonly(), file.packing))
    except DamagedBackup as error:
        raise DamagedBackup(f"{file.name}: {error}") from error
    except FileNotFoundError as error:
        raise DamagedBackup(f"{file.name}: it is missing") from error
    except OSError as error:
        if error.errno != errno.EIO or files.is_remote(path):  # a server that fails may answer tomorrow
            raise
        raise DamagedBackup(f"{file.name}: it cannot be read: {error}") from error


def _bytes_of(path: str, num_bytes: int, verify: bool, readers: ThreadPoolExecutor) -> tuple[np.ndarray, int]:
    """What a file holds, and its checksum, 0 if it is not to be verified."""
    found = files.stat(path).num_bytes
    if found != num_bytes:
        raise DamagedBackup(f"it has {found:,} bytes instead of {num_bytes:,}")
    data = _aligned(num_bytes)
    if files.is_remote(path):
        files.read_into(path, data)
        return data, crc32c(data) if verify else 0
    segments = [data[first : first + _SEGMENT_BYTES] for first in range(0, num_bytes, _SEGMENT_BYTES)]
    starts = range(0, num_bytes, _SEGMENT_BYTES)
    with _opened(path) as descriptor:
        checksums = list(readers.map(functools.partial(_read_segment, descriptor, verify), segments, starts))
    parts = zip(checksums, segments, strict=True)
    return data, functools.reduce(lambda all_before, part: joined(all_before, part[0], part[1].nbytes), parts, 0)


def _read_segment(descriptor: int, verify: bool, segment: np.ndarray, start: int) -> int:
    """Fills a segment from `start` on, and gives its checksum."""
    checksum, done = 0, 0
    while done < segment.nbytes:
        piece = segment[done : done + _PIECE_BYTES]
        count = os.preadv(descriptor, [piece], start + done)
        if not count:
            raise DamagedBackup(f"it ends at byte {start + done:,}")
        if verify:
            checksum = contents.crc32c(piece[:count], seed=checksum)
        done += count
    return checksum


def _aligned(num_bytes: int) -> np.ndarray:
    """Bytes that begin where TensorFlow wants a tensor to."""
    room = np.empty(num_bytes + tensor_files.ALIGNMENT, np.uint8)
    first = -room.ctypes.data % tensor_files.ALIGNMENT
    return room[first : first + num_bytes]


@contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
