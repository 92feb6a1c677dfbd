"""Files of this machine, or of a file system that is mounted on it.

Invariant: under its own name a file is whole, whatever happens while it is written: the bytes go to a temporary file
beside it, reach the disk, and then take its place in one step. `files` calls this for every path without a scheme;
tests have its calls of `os` fail, or its process end, between any two.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence

from tfdist.storage.contents import FileVersion

TEMPORARY_SUFFIX = ".tfdist-tmp"  # of what is being written, which no listing shows
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def exchange(one: str, other: str) -> None:
    """Swaps two names in one step, see rename(2); where the file system cannot, one step after the other."""
    failed = True
    if rename := getattr(ctypes.CDLL(None), "renameat2", None):
        failed = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) != 0
    if failed:
        os.rename(other, f"{one}.old")
        os.rename(one, other)
        os.rename(f"{one}.old", one)


def sync_directory(path: str) -> None:
    """Makes the names in a directory survive a power cut; see fsync(2), which leaves the directory to the caller."""
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalFiles:
    """The functions of `files` for local paths. The methods raise OSError."""

    def read(self, path: str) -> bytes:
        """Returns the whole content."""
        with open(path, "rb") as file:
            return file.read()

    def read_into(self, path: str, buffer: memoryview, first: int) -> int:
        """Fills the buffer with the bytes from `first` on; returns how many there were."""
        with open(path, "rb", buffering=0) as file:
            done = 0
            while count := os.preadv(file.fileno(), [buffer[done:]], first + done):
                done += count
            return done

    def write_atomic(self, path: str, data: bytes) -> None:
        """Replaces a file, durably and whole or not at all."""
        with self._write_temporary(path, [memoryview(data)]) as (temporary, _):
            os.replace(temporary, path)
        sync_directory(os.path.dirname(path))

    def write_new(self, path: str, parts: Iterable[memoryview], crc32c: int | None) -> int:
        """Creates a file, durably and whole or not at all; returns its size. Raises FileExistsError."""
        del crc32c  # which a store over a network needs
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        with self._write_temporary(path, parts) as (temporary, num_bytes):
            os.replace(temporary, path)  # of two that come here at once one is lost: a lease has one writer at a time
        try:
            sync_directory(os.path.dirname(path))
        except OSError:
            self.remove(path)  # whole or not at all: nobody may find what might go with the power
            raise
        return num_bytes

    def exists(self, path: str) -> bool:
        """Whether a file or directory has that name."""
        return os.path.exists(path)

    def is_dir(self, path: str) -> bool:
        """Whether a directory has that name."""
        return os.path.isdir(path)

    def stat(self, path: str) -> FileVersion:
        """Returns the size and modification time, in ns, of a file. Raises FileNotFoundError, and IsADirectoryError."""
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return FileVersion(path, found.st_size, found.st_mtime_ns)

    def glob(self, pattern: str) -> list[str]:
        """Returns the paths that a pattern matches, sorted, without half-written files."""
        return sorted(path for path in glob.glob(pattern) if not path.endswith(TEMPORARY_SUFFIX))

    def list_names(self, path: str) -> list[str]:
        """Returns the names in a directory, sorted, without half-written files; none where it is missing."""
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.endswith(TEMPORARY_SUFFIX))

    def list_tree(self, path: str) -> list[str]:
        """Returns the files below a directory, relative to it and sorted, without half-written ones."""
        found = []
        for directory, _, names in os.walk(path, onerror=_raise_unless_missing):
            inside = os.path.relpath(directory, path)
            found += [os.path.normpath(os.path.join(inside, n)) for n in names if not n.endswith(TEMPORARY_SUFFIX)]
        return sorted(found)

    def make_dirs(self, path: str) -> None:
        """Makes a directory and those above it, durably. Raises FileExistsError where one of them is a file."""
        missing = []
        directory = path
        while directory and not os.path.isdir(directory):
            missing.append(directory)
            directory = os.path.dirname(directory.rstrip("/"))
        for directory in reversed(missing):
            try:
                os.mkdir(directory)
            except FileExistsError:  # made by another process meanwhile, unless it is a file
                if not os.path.isdir(directory):
                    raise
            else:
                sync_directory(os.path.dirname(directory.rstrip("/")))

    def remove(self, path: str) -> None:
        """Removes a file; a missing one is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_tree(self, path: str, first: str | None) -> None:
        """Removes the file `first` of a directory, and then the directory; of a symbolic link the link alone."""
        path = path.rstrip("/")
        if os.path.islink(path):  # a name, as below
            self.remove(path)
            return
        if first is not None:
            self.remove(os.path.join(path, first))
        for directory, directories, names in os.walk(path, topdown=False, onerror=_raise_unless_missing):
            for name in names:
                self.remove(os.path.join(directory, name))
            for name in directories:  # a link to a directory is a name, not a place to empty
                below = os.path.join(directory, name)
                if os.path.islink(below):
                    self.remove(below)
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(directory)

    def remove_stale(self, path: str) -> None:
        """Removes the temporary files of a file or directory `path`, and those below it, that killed writers left."""
        directory, name = os.path.split(path)
        stale = glob.glob(os.path.join(glob.escape(directory), f".{name}.*{TEMPORARY_SUFFIX}"))
        for inside, _, names in () if os.path.islink(path) else os.walk(path):
            stale += [os.path.join(inside, each) for each in names if each.endswith(TEMPORARY_SUFFIX)]
        for each in stale:
            self.remove_tree(each, None) if os.path.isdir(each) else self.remove(each)

    def replace_tree(self, path: str, source: str, names: Sequence[str], last: str) -> None:
        """Copies files of `source` beside `path`, durably, then exchanges both in one step; ignores `last`."""
        del last  # all come at once
        self.make_dirs(os.path.dirname(path) or ".")
        temporary = _temporary_path(path)
        try:
            for name in names:
                self.make_dirs(os.path.dirname(os.path.join(temporary, name)))
                self.write_atomic(os.path.join(temporary, name), self.read(os.path.join(source, name)))
            if os.path.lexists(path):
                exchange(temporary, path)
            else:
                os.replace(temporary, path)
            sync_directory(os.path.dirname(path))
        finally:
            with contextlib.suppress(OSError):
                self.remove_tree(temporary, None)

    @contextlib.contextmanager
    def _write_temporary(self, path: str, parts: Iterable[memoryview]) -> Iterator[tuple[str, int]]:
        """A file beside `path` that holds the parts, on the disk, and its size; gone when the body has ended."""
        temporary = _temporary_path(path)
        num_bytes = 0
        try:
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                try:
                    for part in parts:
                        num_bytes += part.nbytes
                        while part.nbytes:
                            part = part[os.write(descriptor, part) :]
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            except OSError as error:
                if error.filename in (None, temporary):  # the system knows only the descriptor, or a passing name
                    error.filename = path
                raise
            yield temporary, num_bytes
        finally:
            with contextlib.suppress(OSError):  # no listing shows what is left then
                os.unlink(temporary)


def _temporary_path(path: str) -> str:
    """A new name for what is to take the place of `path`."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}")


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
