"""Rows of fixed shapes by the number of their example, in files that the processes of a machine map into memory.

Invariant: a row that counts as there is whole. It is marked only after it was written; what was never completed is
thrown away when the machine was started anew meanwhile, since then nobody knows which pages reached the disk; and a
store without `store.json`, the last file to be made, does not exist. Any number of processes may write, each the rows
that it met.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from tfdist.errors import UserError
from tfdist.storage import private_directory

VERSION = 1
SPARE = 1.05  # what else the file system needs
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")

Row = tuple[tuple[int, ...], np.dtype]


class ExampleStore:
    """An array of `num_examples` rows for each of `rows`, and which examples are there.

    Args:
      rows: shape and type of each part of an example.
      num_examples: how many.
      directory: of this store alone; None keeps it in this process.
    """

    def __init__(self, rows: Sequence[Row], num_examples: int, directory: pathlib.Path | None) -> None:
        self._directory = directory
        self._complete = False
        if directory is None:
            self._arrays = [np.empty((num_examples, *shape), dtype) for shape, dtype in rows]
            self._there = np.zeros(num_examples, np.uint8)
            return
        with _locked(directory.with_suffix(".making"), fcntl.LOCK_EX):
            if not _is_usable(directory):
                _make(directory, rows, num_examples)
        self._arrays = [
            np.memmap(directory / f"{i}.rows", dtype, "r+", shape=(num_examples, *shape))
            for i, (shape, dtype) in enumerate(rows)
        ]
        self._there = np.memmap(directory / "there", np.uint8, "r+", shape=(num_examples,))
        self._complete = (directory / "complete").exists()

    @property
    def num_there(self) -> int:
        return int(np.count_nonzero(self._there))

    def has(self, numbers: np.ndarray) -> bool:
        """Whether all these examples are there."""
        return self._complete or bool(self._there[numbers].all())

    def take(self, numbers: np.ndarray) -> list[np.ndarray]:
        """The rows of examples that are there, part by part."""
        return [array.take(numbers, axis=0) for array in self._arrays]

    def put(self, numbers: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """Keeps examples. A part that is shorter along its second axis than its row is filled up with zeros."""
        for array, part in zip(self._arrays, parts, strict=True):
            if part.shape[1:] == array.shape[1:]:
                array[numbers] = part
            else:
                array[numbers] = 0
                array[numbers, : part.shape[1]] = part
        self._there[numbers] = 1
        if not self._complete and self._there.all():
            self._finish()

    def _finish(self) -> None:
        if self._directory is not None:
            for array in (*self._arrays, self._there):
                assert isinstance(array, np.memmap)
                array.flush()
            _write(self._directory / "complete", "")
        self._complete = True


def row_bytes(rows: Sequence[Row]) -> int:
    """Bytes of an example."""
    return sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in rows) + 1


def hold(directory: pathlib.Path) -> None:
    """Keeps the store of this directory, in memory, from being removed until this process ends; others' remains go.

    The last process that holds it removes it. One that is killed leaves it to whoever comes next. Raises OSError, and
    touches nothing, where the directory above is not this user's alone.
    """
    base = directory.parent
    private_directory.make(str(base))
    held = os.open(_holders(directory), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    atexit.register(_remove_unheld, directory, held)
    for other in base.iterdir():
        if other.is_dir() and other != directory:
            descriptor = os.open(_holders(other), os.O_RDWR | os.O_CREAT, 0o600)
            _remove_unheld(other, descriptor)


def _holders(directory: pathlib.Path) -> pathlib.Path:
    return directory.with_suffix(".held")


def _remove_unheld(directory: pathlib.Path, descriptor: int) -> None:
    """Removes the directory unless another process holds it; gives up the lock of `descriptor`."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    os.close(descriptor)


def _is_usable(directory: pathlib.Path) -> bool:
    try:
        kept = json.loads((directory / "store.json").read_text())
    except (OSError, ValueError):
        return False
    is_same_boot = kept["boot"] == _BOOT.read_text().strip()
    return kept["version"] == VERSION and (is_same_boot or (directory / "complete").exists())


def _make(directory: pathlib.Path, rows: Sequence[Row], num_examples: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    check_room(directory, row_bytes(rows) * num_examples)
    sizes = {f"{i}.rows": row_bytes([row]) - 1 for i, row in enumerate(rows)} | {"there": 1}
    for name, size in sizes.items():
        with open(directory / name, "wb") as file:
            try:  # with the space taken now, a full disk is an error here and no SIGBUS later
                os.posix_fallocate(file.fileno(), 0, max(1, size * num_examples))
            except OSError as error:
                shutil.rmtree(directory, ignore_errors=True)
                raise UserError(f"No room for a cache of examples in {directory}: {error.strerror}.") from error
    _write(directory / "store.json", json.dumps({"version": VERSION, "boot": _BOOT.read_text().strip()}))


def check_room(directory: pathlib.Path, num_bytes: int) -> None:
    """Raises UserError where so much does not fit beside what is there."""
    free = shutil.disk_usage(directory).free
    if num_bytes * SPARE > free:
        raise UserError(
            f"The cache of examples would take {num_bytes:,} bytes, but {directory} has {free:,} free. Give another "
            "place with Cached.directory, cache in the other kind of place (Cached.where), or leave the cache away."
        )


def _write(path: pathlib.Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
    with open(scratch, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


@contextlib.contextmanager
def _locked(path: pathlib.Path, kind: int) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a") as held:
        fcntl.flock(held, kind)
        yield
