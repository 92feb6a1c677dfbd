"""Reads the data files of one checkpoint into arrays, verifying them on the way.

Invariant: size and CRC32C of every file are found right on the very bytes that become the arrays, before any of them
is handed out. Local files are mapped into memory, objects are read once. Catalog and restore read through this.
"""

from __future__ import annotations

import errno
import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tfdist.checkpoint.format import packing, tensor_files
from tfdist.checkpoint.format.checksum import crc32c
from tfdist.checkpoint.format.manifest import DamagedCheckpoint, Manifest, StoredFile
from tfdist.storage import files

_MOST_THREADS = 8
_HEADER_BYTES = 1 << 16  # of a tensor, at most, its name included


def read_files(path: str, manifest: Manifest, *, verify: bool = True) -> dict[str, np.ndarray]:
    """The tensors of the checkpoint at `path`, not to be written to.

    Raises:
      DamagedCheckpoint: naming the file and what was wrong with it.
      OSError: the store does not answer.
    """
    most_bytes = manifest.num_tensor_bytes + _HEADER_BYTES * (manifest.num_tensors + 1)
    threads = ThreadPoolExecutor(max(1, min(_MOST_THREADS, len(manifest.files))), "tfdist-restore")
    with threads:
        read = [threads.submit(_read_file, path, file, verify, most_bytes) for file in manifest.files]
        tensors = {name: array for future in read for name, array in future.result().items()}
    if len(tensors) != manifest.num_tensors:
        raise DamagedCheckpoint(f"its files hold {len(tensors):,} tensors instead of {manifest.num_tensors:,}")
    return tensors


def _read_file(path: str, file: StoredFile, verify: bool, most_bytes: int) -> dict[str, np.ndarray]:
    try:
        data = _bytes_of(files.join(path, file.name), file.num_bytes)
        if verify and (found := crc32c(data)) != file.crc32c:
            raise DamagedCheckpoint(f"its checksum is {found:08x} instead of {file.crc32c:08x}")
        return tensor_files.read(packing.unpack(data, file.packing, most_bytes=most_bytes))
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{file.name}: {error}") from error
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{file.name}: it is missing") from error
    except OSError as error:
        if error.errno != errno.EIO or files.is_remote(path):  # a server that fails may answer tomorrow
            raise
        raise DamagedCheckpoint(f"{file.name}: it cannot be read: {error}") from error


def _bytes_of(path: str, num_bytes: int) -> memoryview:
    found = files.stat(path).num_bytes
    if found != num_bytes:
        raise DamagedCheckpoint(f"it has {found:,} bytes instead of {num_bytes:,}")
    if not files.is_remote(path):
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ))
    data = np.empty(num_bytes, np.uint8)
    files.read_into(path, data)
    data.flags.writeable = False
    return data.data
