"""The files that data are read from, local or `gs://`: which there are, and the bytes of those that are read whole."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tfdist.errors import UserError, build_user_error
from tfdist.storage import files
from tfdist.storage.contents import FileVersion

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff")
PathLike = str | os.PathLike[str]
Patterns = PathLike | Sequence[PathLike]


def expand_path(path: PathLike) -> str:
    """A path as text, with the user's home directory for `~`."""
    return os.path.expanduser(os.fspath(path))


def file_version(path: str) -> FileVersion:
    """Returns the size and version of an input file; raises UserError where there is no such file."""
    try:
        return files.stat(path)
    except IsADirectoryError as error:
        raise UserError(f"{path} is a directory, where a file was expected. Write the files in it: {path}/*") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"There is no file {path}.") from error
    except OSError as error:
        raise UserError(f"The file {path} cannot be looked at: {error.strerror or error}") from error


def find_files(patterns: Patterns, setting: str) -> list[FileVersion]:
    """The files of one or several patterns: in the order of the patterns, sorted within each, each once.

    Raises:
      UserError: they are no patterns, or match nothing; `setting` is where they were written.
    """
    listed = [patterns] if isinstance(patterns, (str, os.PathLike)) else patterns
    is_list = isinstance(listed, (list, tuple)) and len(listed) > 0
    if not is_list or not all(isinstance(each, (str, os.PathLike)) and os.fspath(each) for each in listed):
        raise UserError(
            f"{setting} is {patterns!r}; write a path, a pattern such as 'data/train-*', or a list of them."
        )
    found: list[str] = []
    for pattern in map(expand_path, listed):
        try:
            matched = [pattern] if files.exists(pattern) else files.glob(pattern)
        except OSError as error:
            raise UserError(f"The files {pattern!r} cannot be listed: {error.strerror or error}") from error
        if not matched:
            place = "" if files.is_remote(pattern) else f" (from {os.getcwd()})"
            raise build_user_error(
                f"No file matches {pattern!r}{place}. Write paths or patterns of files that exist.",
                error_id="missing-file",
            )
        found += matched
    return [file_version(path) for path in dict.fromkeys(found)]


def read_whole(file: FileVersion) -> bytes:
    """The bytes of a file.

    Raises:
      UserError: it cannot be read, or became shorter.
    """
    try:
        data = files.read_range(file.path, 0, file.num_bytes) if file.num_bytes else b""
    except OSError as error:
        raise UserError(f"{file.path} cannot be read: {error}") from error
    if len(data) != file.num_bytes:
        raise UserError(f"{file.path} became shorter while it was read: it had {file.num_bytes:,} bytes. Start again.")
    return data
