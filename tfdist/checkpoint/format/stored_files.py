"""Reads the data files of one checkpoint into arrays, verifying them on the way.

Invariant: size and CRC32C of every file are found right on the very bytes that become the arrays, before any of them
is handed out, unless another has verified them for the caller. Local files are mapped into memory, objects are read
once; of those that are verified, what is wanted. Catalog and restore read through this.
"""

from __future__ import annotations

import errno
import functools
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tfdist.checkpoint.format import tensor_files
from tfdist.checkpoint.format.manifest import DamagedCheckpoint, Manifest, StoredFile
from tfdist.storage import files
from tfdist.storage.contents import crc32c

_MOST_THREADS = 8


def read_files(
    path: str, manifest: Manifest, *, verify: bool = True, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """The tensors of the checkpoint at `path` that are `wanted`, not to be written to.

    Raises:
      DamagedCheckpoint: naming the file and what was wrong with it.
      OSError: the store does not answer.
    """
    threads = ThreadPoolExecutor(max(1, min(_MOST_THREADS, len(manifest.files))), "tfdist-restore")
    with threads:
        read = [threads.submit(_read_file, path, file, verify, wanted) for file in manifest.files]
        tensors = {name: array for future in read for name, array in future.result().items()}
    if len(tensors) != manifest.num_tensors:
        raise DamagedCheckpoint(f"its files hold {len(tensors):,} tensors instead of {manifest.num_tensors:,}")
    return {name: array for name, array in tensors.items() if array is not None}


def _read_file(
    path: str, file: StoredFile, verify: bool, wanted: Callable[[str], bool]
) -> dict[str, np.ndarray | None]:
    """None for each that is not wanted."""
    try:
        if not verify and files.is_remote(path):
            return tensor_files.read_wanted(functools.partial(_read_range, path, file), wanted)
        data = _read_bytes(files.join(path, file.name), file.num_bytes)
        if verify and (found := crc32c(data)) != file.crc32c:
            raise DamagedCheckpoint(f"its checksum is {found:08x} instead of {file.crc32c:08x}")
        tensors = tensor_files.read(data)
        kept = {name: array for name, array in tensors.items() if wanted(name)}
        if len(kept) < len(tensors) and files.is_remote(path):  # what is not wanted is to go
            kept = {name: _copy_array(array) for name, array in kept.items()}
        return dict.fromkeys(tensors) | kept
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{file.name}: {error}") from error
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{file.name}: it is missing") from error
    except OSError as error:
        if error.errno != errno.EIO or files.is_remote(path):  # a server that fails may answer tomorrow
            raise
        raise DamagedCheckpoint(f"{file.name}: it cannot be read: {error}") from error


def _copy_array(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _read_range(path: str, file: StoredFile, first: int, count: int) -> memoryview:
    if first + count > file.num_bytes:
        raise DamagedCheckpoint(f"its header speaks of {first + count:,} bytes, and it has {file.num_bytes:,}")
    data = np.empty(count, np.uint8)
    files.read_into(files.join(path, file.name), data, first=first)
    return data.data


def _read_bytes(path: str, num_bytes: int) -> memoryview:
    found = files.stat(path).num_bytes
    if found != num_bytes:
        raise DamagedCheckpoint(f"it has {found:,} bytes instead of {num_bytes:,}")
    if not files.is_remote(path):
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ))
    data = np.empty(num_bytes, np.uint8)
    files.read_into(path, data)
    return data.data
