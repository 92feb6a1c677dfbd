"""Copies tensors into host memory that was allocated before, laid out as the files that will hold it.

Invariant: when `HostBuffer.fill` returns, nothing of the sources is held any more: a view of a variable that stays
alive makes its next update copy it. There is one buffer. The manager owns a `SnapshotBuffer`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from tfdist.checkpoint.format.tensor_files import FilePlan, TensorSpec, plan_files

_PIECE_BYTES = 8 * 2**20
_SMALL_BYTES = 2**18  # not worth a thread
_PAGE_BYTES = 4096
_MOST_THREADS = 4


def view_arrays(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns arrays over the memory of variables, tensors and arrays, without a copy where that is host memory.

    A distributed variable is read as its first replica of this worker: what differs between replicas or workers has
    to be brought together before. No collective operation is started.
    """
    return {name: _view_tensor(tensor) for name, tensor in tensors.items()}


class HostBuffer:
    """Room for one snapshot: an array of bytes for each file."""

    def __init__(self, files: Sequence[FilePlan]) -> None:
        self.files = tuple(files)
        self._destinations: dict[str, np.ndarray] = {}
        self.contents: list[np.ndarray] = []
        for file in files:
            content = np.empty(file.num_bytes, np.uint8)
            content[::_PAGE_BYTES] = 0  # has the system give the pages now
            self.contents.append(content)
            for spec, offset in file.offsets:
                self._destinations[spec.name] = content[offset : offset + spec.num_bytes]

    def parts(self, index: int) -> list[memoryview]:
        """The bytes of one file, in order."""
        return [memoryview(self.files[index].header), self.contents[index].data]

    def fill(self, arrays: Mapping[str, np.ndarray], threads: ThreadPoolExecutor) -> None:
        """Copies arrays of the planned names, types and shapes."""
        large, small = [], []
        for name, array in arrays.items():
            destination = self._destinations[name]
            source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # a copy only of one that lies in pieces
            if source.nbytes <= _SMALL_BYTES:
                small.append((destination, source))
                continue
            for first in range(0, source.nbytes, _PIECE_BYTES):
                large.append((destination[first : first + _PIECE_BYTES], source[first : first + _PIECE_BYTES]))
        copies = [threads.submit(np.copyto, *pair) for pair in large]
        for destination, source in small:
            np.copyto(destination, source)
        for copy in copies:
            copy.result()


class SnapshotBuffer:
    """The one `HostBuffer` of a run, allocated beside what its owner does. One thread takes, another gives back."""

    def __init__(self, *, max_file_bytes: int) -> None:
        self._max_file_bytes = max_file_bytes
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "tfdist-snapshot")
        self._specs: tuple[TensorSpec, ...] | None = None
        self._allocated: Future[HostBuffer] | None = None
        self._is_free = threading.Event()
        self._is_free.set()

    def take(self, arrays: Mapping[str, np.ndarray]) -> tuple[HostBuffer, float]:
        """Waits until the buffer's last content is written, fills it with `arrays`; returns it and the seconds waited.

        Raises UserError for arrays that cannot be stored, MemoryError when there is no room.
        """
        begun = time.perf_counter()
        has_waited = not self._is_free.is_set()
        self._is_free.wait()
        waited_seconds = time.perf_counter() - begun if has_waited else 0.0
        buffer = self._allocate(arrays)
        buffer.fill(arrays, self._threads)
        self._is_free.clear()
        return buffer, waited_seconds

    def reserve(self, arrays: Mapping[str, np.ndarray]) -> Future[HostBuffer]:
        """Has a buffer for arrays of such names, types and shapes allocated, unless it is there already."""
        specs = tuple(TensorSpec(name, array.dtype, array.shape) for name, array in arrays.items())
        if self._allocated is None or specs != self._specs:
            files = tuple(plan_files(specs, max_file_bytes=self._max_file_bytes))
            self._allocated = None  # gone before the next one comes
            self._specs, self._allocated = specs, self._threads.submit(HostBuffer, files)
        return self._allocated

    def give_back(self) -> None:
        """Lets the next snapshot have the buffer, which is written out."""
        self._is_free.set()

    def close(self) -> None:
        """Ends the threads and frees the buffer."""
        self._threads.shutdown()
        self._allocated = None

    def _allocate(self, arrays: Mapping[str, np.ndarray]) -> HostBuffer:
        try:
            return self.reserve(arrays).result()
        except BaseException as error:
            self._allocated = None  # the next one tries again
            if not isinstance(error, MemoryError):
                raise
            num_bytes = sum(array.nbytes for array in arrays.values())
            raise MemoryError(f"There is no room for a copy of {num_bytes:,} bytes.") from error


def _view_tensor(source: Any) -> np.ndarray:
    if isinstance(source, np.ndarray | np.generic):
        array = np.asarray(source)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    value = getattr(source, "value", source)
    source = source if callable(value) else value  # a Keras variable holds TensorFlow's
    if hasattr(source, "read_value"):
        source = (source.values[0] if hasattr(source, "values") else source).value()
    return np.asarray(source)
