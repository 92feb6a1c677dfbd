"""Finds the files that data are read from, local or `gs://`, and reads ranges of their bytes, no byte more.

Every byte of a record passes through `read_range`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.contents import FileVersion


def file_version(path: str) -> FileVersion:
    """Raises UserError where there is no such file."""
    try:
        return files.stat(path)
    except IsADirectoryError as error:
        raise UserError(f"{path} is a directory, where a file was expected. Write the files in it: {path}/*") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"There is no file {path}.") from error
    except OSError as error:
        raise UserError(f"The file {path} cannot be looked at: {error.strerror or error}") from error


def matching_files(patterns: str | Sequence[str]) -> list[str]:
    """The files of one or several patterns: in the order of the patterns, sorted within each, each once.

    Raises:
      UserError: a pattern matches nothing.
    """
    found: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            matched = files.glob(pattern)
        except OSError as error:
            raise UserError(f"The files {pattern!r} cannot be listed: {error.strerror or error}") from error
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
    return files.read_range(path, first, count)
