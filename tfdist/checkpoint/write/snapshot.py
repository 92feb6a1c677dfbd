"""Copies tensors into host memory that was allocated before, laid out as the files that will hold it.

Invariant: when `HostBuffer.fill` returns, nothing of the sources is held any more: a view of a variable that stays
alive makes its next update copy it. There are two buffers at most. The manager owns a `BufferPool`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from tfdist.checkpoint.format.tensor_files import FilePlan, TensorSpec, plan

NUM_BUFFERS = 2
_PIECE_BYTES = 8 * 2**20
_SMALL_BYTES = 2**18  # not worth a thread
_PAGE_BYTES = 4096
_MOST_THREADS = 4


def views(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays over the memory of variables, tensors and arrays, without a copy where they lie in host memory.

    A distributed variable is read as its first replica of this worker: what differs between replicas or workers has
    to be brought together before. No collective operation is started.
    """
    return {name: _view(tensor) for name, tensor in tensors.items()}


class HostBuffer:
    """Room for one snapshot: an array of bytes for each file."""

    def __init__(self, files: Sequence[FilePlan]) -> None:
        self.files = tuple(files)
        self._places: dict[str, np.ndarray] = {}
        self.contents: list[np.ndarray] = []
        for file in files:
            content = np.empty(file.num_bytes, np.uint8)
            content[::_PAGE_BYTES] = 0  # has the system give the pages now
            self.contents.append(content)
            for spec, offset in file.offsets:
                self._places[spec.name] = content[offset : offset + spec.num_bytes]

    @property
    def num_tensors(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        return sum(content.nbytes for content in self.contents)

    def parts(self, index: int) -> list[memoryview]:
        """The bytes of one file, in order."""
        return [memoryview(self.files[index].header), self.contents[index].data]

    def fill(self, arrays: Mapping[str, np.ndarray], threads: ThreadPoolExecutor) -> None:
        """Copies arrays of the planned names, types and shapes."""
        large, small = [], []
        for name, array in arrays.items():
            place, source = self._places[name], _bytes_of(array)
            if source.nbytes <= _SMALL_BYTES:
                small.append((place, source))
                continue
            for first in range(0, source.nbytes, _PIECE_BYTES):
                large.append((place[first : first + _PIECE_BYTES], source[first : first + _PIECE_BYTES]))
        copies = [threads.submit(np.copyto, *pair) for pair in large]
        for place, source in small:
            np.copyto(place, source)
        for copy in copies:
            copy.result()


class BufferPool:
    """Two buffers that take turns, allocated beside what their owner does. One thread takes, others may give back."""

    def __init__(self, *, max_file_bytes: int) -> None:
        self._max_file_bytes = max_file_bytes
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "tfdist-snapshot")
        self._specs: tuple[TensorSpec, ...] | None = None
        self._new: list[Future[HostBuffer]] = []  # nobody had them yet
        self._changed = threading.Condition()
        self._free: list[HostBuffer] = []
        self._in_use: list[HostBuffer] = []  # of the plan that is now

    def take(self, arrays: Mapping[str, np.ndarray]) -> tuple[HostBuffer, float]:
        """A buffer filled with `arrays`, and the seconds that were spent because all were in use, 0.0 if not.

        Raises UserError for arrays that cannot be stored, MemoryError when there is no room.
        """
        self.reserve(arrays)
        buffer, waited_seconds = self._acquire()
        try:
            buffer.fill(arrays, self._threads)
        except BaseException:
            self.give_back(buffer)
            raise
        return buffer, waited_seconds

    def reserve(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Has what `take` needs for such arrays allocated, if that is not what it has already.

        Buffers in use that were allocated for other names, types or shapes are dropped when they come back.
        """
        specs = tuple(TensorSpec(name, array.dtype, array.shape) for name, array in arrays.items())
        if specs == self._specs:
            return
        files = tuple(plan(specs, max_file_bytes=self._max_file_bytes))
        with self._changed:
            self._free, self._in_use = [], []
        self._new = [self._threads.submit(HostBuffer, files) for _ in range(NUM_BUFFERS)]
        self._specs = specs

    def give_back(self, buffer: HostBuffer) -> None:
        """Lets the next snapshot have a buffer that is written out."""
        with self._changed:
            if buffer in self._in_use:  # not one of an earlier plan
                self._in_use.remove(buffer)
                self._free.append(buffer)
                self._changed.notify_all()

    def close(self) -> None:
        self._threads.shutdown()
        with self._changed:
            self._free.clear()

    def _acquire(self) -> tuple[HostBuffer, float]:
        with self._changed:
            while self._new and not self._free:
                with contextlib.suppress(MemoryError):  # where there is room for one, training waits for its write
                    self._free.append(self._new.pop(0).result())
            if not self._free and not self._in_use:
                specs, self._specs = self._specs or (), None  # the next one tries again
                raise MemoryError(f"There is no room for a copy of {sum(s.num_bytes for s in specs):,} bytes.")
            begun = time.perf_counter()
            has_to_wait = not self._free
            self._changed.wait_for(lambda: self._free)
            self._in_use.append(self._free.pop())
            return self._in_use[-1], time.perf_counter() - begun if has_to_wait else 0.0


def _view(source: Any) -> np.ndarray:
    if isinstance(source, np.ndarray | np.generic):
        return _native(np.asarray(source))
    value = getattr(source, "value", source)
    source = source if callable(value) else value  # a Keras variable holds TensorFlow's
    if hasattr(source, "read_value"):
        source = (source.values[0] if hasattr(source, "values") else source).value()
    return np.asarray(source)


def _native(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """The items as bytes; a copy only of an array that does not lie in one piece."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
