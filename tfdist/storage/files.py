"""Reads and writes bytes by path, local or `gs://`, in the same words.

Invariant: a file that `write_atomic` wrote is the old one or the new one, never a part; failures are OSErrors, and a
path that no store serves is a UserError. Everything that writes a run directory goes through here.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Protocol

from tfdist.errors import UserError
from tfdist.storage.gcs import GcsFiles
from tfdist.storage.local import LocalFiles
from tfdist.storage.log_sink import LogSink

StrPath = str | os.PathLike[str]


class Files(Protocol):
    """What a store offers; the functions below say what each method means."""

    def read(self, path: str) -> bytes: ...
    def write_atomic(self, path: str, data: bytes) -> None: ...
    def open_log(self, path: str, flush_seconds: float) -> LogSink: ...
    def exists(self, path: str) -> bool: ...
    def list_names(self, path: str) -> list[str]: ...
    def make_dirs(self, path: str) -> None: ...
    def remove(self, path: str) -> None: ...


_LOCAL: Files = LocalFiles()
_GCS: Files = GcsFiles()


def read(path: StrPath) -> bytes:
    """The whole content; raises FileNotFoundError."""
    return _store(path).read(os.fspath(path))


def write_atomic(path: StrPath, data: bytes | str) -> None:
    """Puts `data` (text as UTF-8) in the place of `path`, durably and whole or not at all. Its directory must exist."""
    _store(path).write_atomic(os.fspath(path), data.encode() if isinstance(data, str) else data)


def open_log(path: StrPath, *, flush_seconds: float = 30.0) -> LogSink:
    """A log that goes on behind what the file holds.

    On a local path every line is stored at once. On `gs://`, where objects cannot be appended to, the object is
    rewritten at most every `flush_seconds` and on `close`: close it in a `finally`.
    """
    return _store(path).open_log(os.fspath(path), flush_seconds)


def exists(path: StrPath) -> bool:
    """Whether a file or directory of that name is there."""
    return _store(path).exists(os.fspath(path))


def list_names(path: StrPath) -> list[str]:
    """The names in a directory, sorted, without half-written files; none when the directory is missing."""
    return _store(path).list_names(os.fspath(path))


def make_dirs(path: StrPath) -> None:
    """Makes a directory and those above it; on `gs://` there is nothing to make."""
    _store(path).make_dirs(os.fspath(path))


def remove(path: StrPath) -> None:
    """Removes a file; a missing one is fine."""
    _store(path).remove(os.fspath(path))


def join(path: StrPath, *parts: str) -> str:
    """The path of something below `path`."""
    return posixpath.join(os.fspath(path), *parts)


def is_remote(path: StrPath) -> bool:
    """Whether the path names an object of a bucket."""
    return _store(path) is _GCS


def _store(path: StrPath) -> Files:
    text = os.fspath(path)
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/", text)
    if scheme is None:
        return _LOCAL
    if re.match(r"gs://[^/]", text):
        return _GCS
    raise UserError(
        f"{text!r} is not a path that tfdist can use: it takes local paths and gs://BUCKET/DIRECTORY. "
        f"Received the scheme {text[: scheme.end()]!r}; write a local path without a scheme, or gs:// and a bucket."
    )
