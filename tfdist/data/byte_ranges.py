"""Reads ranges of bytes of files, local or `gs://`, and no byte more.

Called by the formats whose records lie at known places; every byte of a record passes through `read_range`.
"""

from __future__ import annotations

import dataclasses
import os

import tensorflow as tf

from tfdist.errors import UserError
from tfdist.storage import files


@dataclasses.dataclass(frozen=True)
class FileVersion:
    """A file as it is now; another size or time of change means other content."""

    path: str
    num_bytes: int
    changed_nanoseconds: int


def file_version(path: str) -> FileVersion:
    """Raises UserError where there is no such file."""
    try:
        if tf.io.gfile.isdir(path):
            raise UserError(f"{path} is a directory, where a file was expected. Write the files in it: {path}/*")
        found = tf.io.gfile.stat(path)
    except tf.errors.NotFoundError as error:
        raise UserError(f"There is no file {path}.") from error
    except tf.errors.OpError as error:
        raise UserError(f"The file {path} cannot be looked at: {error.message}") from error
    return FileVersion(path, int(found.length), int(found.mtime_nsec))


def matching_files(patterns: str | list[str] | tuple[str, ...]) -> list[str]:
    """The files of one or several patterns: in the order of the patterns, sorted within each, each once.

    Raises:
      UserError: a pattern matches nothing.
    """
    found: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            matched = sorted(tf.io.gfile.glob(pattern))
        except tf.errors.OpError as error:
            raise UserError(f"The files {pattern!r} cannot be listed: {error.message}") from error
        if not matched:
            raise UserError(
                f"No file matches {pattern!r} (from {os.getcwd()}). Write paths or patterns of files that exist."
            )
        found += matched
    if not found:
        raise UserError(f"A data set needs files; received {patterns!r}. Write a pattern such as 'data/train-*'.")
    return list(dict.fromkeys(found))


def read_range(path: str, first: int, count: int) -> bytes:
    """Bytes first … first + count - 1; fewer where the file ends before."""
    if files.is_remote(path):
        with tf.io.gfile.GFile(path, "rb") as remote:
            remote.seek(first)
            return remote.read(count)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(descriptor, count, first)
        while 0 < len(data) < count and (more := os.pread(descriptor, count - len(data), first + len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)
