"""Reads and writes bytes by path, local or `gs://`, in the same words.

Invariant: a file that `write_atomic` wrote is the old one or the new one, never a part; failures are OSErrors, and a
path that no store serves is a UserError. Everything that writes a run directory goes through here.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
from collections.abc import Iterable

from tfdist.errors import UserError, is_unicode
from tfdist.storage import contents, gcs_requests
from tfdist.storage.contents import Buffer, FileVersion
from tfdist.storage.gcs import GcsFiles
from tfdist.storage.local_files import LocalFiles
from tfdist.storage.logs import LogSink, Mirror, MirroredLog

StrPath = str | os.PathLike[str]
limit_patience = gcs_requests.limit_patience  # of no effect on local paths

_LOCAL = LocalFiles()
_GCS = GcsFiles()


def read(path: StrPath) -> bytes:
    """The whole content; raises FileNotFoundError."""
    return _store(path).read(os.fspath(path))


def read_range(path: StrPath, first: int, count: int) -> bytes:
    """Bytes first … first + count - 1; fewer where the file ends before. Raises FileNotFoundError."""
    content = bytearray(count)
    found = _store(path).read_into(os.fspath(path), memoryview(content), first)
    return bytes(memoryview(content)[:found])


def read_into(path: StrPath, buffer: Buffer) -> None:
    """Fills a writable buffer with a file's first bytes; the quick way to read much.

    On `gs://` several ranges are read at once, all of one generation of the object, whose checksum is not verified.

    Raises:
      FileNotFoundError: there is no such file.
      OSError: it ends before the buffer is full. What the buffer holds is then undefined.
    """
    view = memoryview(buffer).cast("B")
    found = _store(path).read_into(os.fspath(path), view, 0)
    if found < view.nbytes:
        text = f"it ends at byte {found:,}, {view.nbytes - found:,} short"
        raise OSError(errno.EIO, text, os.fspath(path))


def write_atomic(path: StrPath, data: bytes | str) -> None:
    """Puts `data` (text as UTF-8) in the place of `path`, durably and whole or not at all. Its directory must exist."""
    _store(path).write_atomic(os.fspath(path), data.encode() if isinstance(data, str) else data)


def write_new(path: StrPath, parts: Iterable[Buffer], *, crc32c: int | None = None) -> int:
    """Creates a file that must not exist, durably and whole or not at all. Its directory must exist.

    Of several that create an object at once, one succeeds; a local directory has one writer, by its lease. An answer
    that was lost on its way back from a server is asked for again, so that success means: these bytes are there, and
    this call put them there or found them alike.

    Args:
      path: the new file.
      parts: what has the buffer protocol and lies in one piece each, written one behind the other without a copy. A
        local store takes each when the one before it is written, so that an iterator can make them meanwhile.
      crc32c: the checksum of all parts together, where the caller knows it; `contents.crc32c` computes it.

    Returns:
      The number of bytes written.

    Raises:
      FileExistsError: the file is there already, made by another.
      OSError: it could not be written; then `path` does not exist, unless the store cannot be asked any more.
    """
    views = contents.iterate_views(parts)
    return _store(path).write_new(os.fspath(path), views, crc32c)


def open_log(path: StrPath, *, flush_seconds: float = 30.0) -> LogSink:
    """A log that continues behind what the file holds.

    On a local path every line is stored at once. On `gs://`, where objects cannot be appended to, the object is
    rewritten at most every `flush_seconds` and on `close`: close it in a `finally`.
    """
    name = os.fspath(path)
    return MirroredLog(name, flush_seconds) if is_remote(path) else LogSink(name)


def open_mirror(path: StrPath, *, interval_seconds: float = 30.0) -> Mirror:
    """A local directory whose files appear below a gs:// `path`, for libraries that can only write local ones."""
    return Mirror(os.fspath(path), interval_seconds)


def exists(path: StrPath) -> bool:
    """Whether a file or directory of that name is there."""
    return _store(path).exists(os.fspath(path))


def is_dir(path: StrPath) -> bool:
    """Whether a directory of that name is there; on `gs://`, whether any object lies below that name."""
    return _store(path).is_dir(os.fspath(path))


def stat(path: StrPath) -> FileVersion:
    """The size and the version of a file; raises FileNotFoundError, and IsADirectoryError."""
    return _store(path).stat(os.fspath(path))


def glob(pattern: str) -> list[str]:
    """The files and directories that a pattern with `*`, `?` and `[…]` matches, sorted; none of these matches `/`."""
    return _store(pattern).glob(pattern)


def list_names(path: StrPath) -> list[str]:
    """The names in a directory, sorted, without half-written files; none when the directory is missing."""
    return _store(path).list_names(os.fspath(path))


def list_tree(path: StrPath) -> list[str]:
    """The files below a directory as paths relative to it, sorted, half-written ones aside; none if it is missing."""
    return _store(path).list_tree(os.fspath(path))


def make_dirs(path: StrPath) -> None:
    """Makes a directory and those above it; on `gs://` there is nothing to make."""
    _store(path).make_dirs(os.fspath(path))


def remove(path: StrPath) -> None:
    """Removes a file; a missing one is fine."""
    _store(path).remove(os.fspath(path))


def remove_tree(path: StrPath, *, first: str | None = None) -> None:
    """Removes a directory and all that is below it, half-written files too; a missing one is fine.

    Of a symbolic link, at `path` or below, it removes the link alone.

    Args:
      path: the directory.
      first: a file in it that goes before the others.
    """
    _store(path).remove_tree(os.fspath(path), first)


def remove_stale(path: StrPath) -> None:
    """Removes what killed writers of a file (whose name may have `*`), or of a directory and all below, left there.

    It does not follow symbolic links.
    """
    _store(path).remove_stale(os.fspath(path).rstrip("/"))


def replace_tree(path: StrPath, source: str, *, last: str) -> int:
    """Puts a copy of a local directory in the place of `path`, which nobody else writes; its bytes.

    On a local path readers find the old or the new one, whatever happens; on `gs://` no `last` while it is changed.

    Args:
      path: a directory, or nothing yet.
      source: the directory to copy.
      last: the file without which the others mean nothing.
    """
    names = _LOCAL.list_tree(source)
    _store(path).replace_tree(os.fspath(path).rstrip("/"), source, names, last)
    return sum(_LOCAL.stat(join(source, name)).num_bytes for name in names)


def join(path: StrPath, *parts: str) -> str:
    """The path of something below `path`."""
    return posixpath.join(os.fspath(path), *parts)


def is_remote(path: StrPath) -> bool:
    """Whether the path names an object of a bucket."""
    return _store(path) is _GCS


def _store(path: StrPath) -> LocalFiles | GcsFiles:
    text = os.fspath(path)
    if "\0" in text or not is_unicode(text):
        raise UserError(f"{text!r} is no path: it has characters that no file's name can have.")
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/", text)
    if scheme is None:
        return _LOCAL
    if re.match(r"gs://[^/]", text):
        return _GCS
    raise UserError(
        f"{text!r} is not a path that tfdist can use: it takes local paths and gs://BUCKET/DIRECTORY. "
        f"Received the scheme {text[: scheme.end()]!r}; write a local path without a scheme, or gs:// and a bucket."
    )
