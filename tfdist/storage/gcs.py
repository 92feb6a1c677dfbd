"""Objects of Google Cloud Storage as files, through the library google-cloud-storage.

Invariant: the methods mean what they mean on a local path, and every failure is an OSError that names the path. A
server that refuses connections fails a call within 5 seconds, one that cannot be reached or stalls within some 20.
`files` calls this for `gs://` paths.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tfdist.storage.contents import FileVersion
from tfdist.storage.gcs_requests import TIMEOUT, Attempts, client, persist, split_path
from tfdist.storage.gcs_transfers import delete, delete_all, download, look_up, upload

_READ_TRIES = 8


class GcsFiles:
    """The functions of `files` for `gs://` paths. An upload of an object is atomic; directories need not be made."""

    def read(self, path: str) -> bytes:
        """Downloads the whole object, of one generation; raises ESTALE where it is rewritten during every try."""
        for last in [False] * (_READ_TRIES - 1) + [True]:
            found = look_up(path)
            content = bytearray(found.size)
            try:
                download(path, 0, memoryview(content), found.generation)
                break
            except OSError as error:  # rewritten meanwhile, as logs are
                if error.errno != errno.ESTALE or last:
                    raise
        return bytes(content)

    def read_into(self, path: str, buffer: memoryview, first: int) -> int:
        """Fills the buffer with bytes of one generation, from `first` on; returns how many there were."""
        return download(path, first, buffer)

    def write_atomic(self, path: str, data: bytes) -> None:
        """Uploads `data` as the new generation of the object."""
        upload(path, [memoryview(data)], replaces=None)

    def write_new(self, path: str, parts: Iterable[memoryview], crc32c: int | None) -> int:
        """Uploads an object that must not exist; returns its size in bytes. Raises FileExistsError."""
        parts = list(parts)
        upload(path, parts, replaces=0, checksum=crc32c)
        return sum(part.nbytes for part in parts)

    def exists(self, path: str) -> bool:
        """Whether an object has that name, or any lies below it."""
        try:
            return self.is_dir(path) or bool(look_up(path))
        except (FileNotFoundError, IsADirectoryError):
            return False

    def is_dir(self, path: str) -> bool:
        """Whether any object lies below that name; a bucket is a directory also when it is empty."""
        prefix = _prefix(path)
        try:
            return bool(_list_names(path, prefix, most=1)) or not prefix
        except FileNotFoundError:
            return False

    def stat(self, path: str) -> FileVersion:
        """Returns the size and generation of an object. Raises FileNotFoundError, and IsADirectoryError."""
        try:
            found = look_up(path)
        except FileNotFoundError:
            if self.is_dir(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
            raise
        return FileVersion(path, found.size, found.generation)

    def glob(self, pattern: str) -> list[str]:
        """Returns the objects and prefixes that a pattern matches, sorted; lists only levels that have a wildcard."""
        bucket, name = split_path(pattern)
        found = [f"gs://{bucket}"]
        components = name.split("/")
        for depth, component in enumerate(components, 1):
            head = re.split(r"[*?\[]", component)[0]
            if head == component and depth < len(components):
                found = [f"{path}/{component}" for path in found]
            elif head == component:
                found = [each for path in found if self.exists(each := f"{path}/{component}")]
            else:
                found = [f"{path}/{each}" for path in found for each in self._match_names(path, head, component)]
        return sorted(found)

    def list_names(self, path: str) -> list[str]:
        """Returns the names one level below a prefix, sorted; none where nothing is below it."""
        return sorted(self._list_level(path))

    def list_tree(self, path: str) -> list[str]:
        """Returns the objects below a prefix, relative to it and sorted."""
        return sorted(name for name in self._list_below(path) if not name.endswith("/"))

    def make_dirs(self, path: str) -> None:
        """Does nothing: a prefix needs no making."""
        del path

    def remove(self, path: str) -> None:
        """Deletes an object; a missing one is fine."""
        delete(path)

    def remove_tree(self, path: str, first: str | None) -> None:
        """Deletes the object `first` below a prefix, and then all others there."""
        if first is not None:
            delete(f"{path.rstrip('/')}/{first}")
        delete_all([f"{path.rstrip('/')}/{name}" for name in self._list_below(path)])

    def remove_stale(self, path: str) -> None:
        """Does nothing: an upload leaves nothing half written."""
        del path

    def replace_tree(self, path: str, source: str, names: Sequence[str], last: str) -> None:
        """Deletes `last`, uploads the files `names` of the local `source`, `last` behind them, and deletes the rest."""
        delete(f"{path}/{last}")
        for name in sorted(names, key=lambda name: (name == last, name)):
            with open(os.path.join(source, name), "rb") as file:
                self.write_atomic(f"{path}/{name}", file.read())
        delete_all([f"{path}/{name}" for name in self._list_below(path) if name not in names])

    def _match_names(self, path: str, head: str, component: str) -> Iterator[str]:
        """The names in a directory that match; hidden ones only where that is asked for, as in a shell."""
        for name in self._list_level(path, head):
            if fnmatch.fnmatchcase(name, component) and name.startswith(".") <= component.startswith("."):
                yield name

    def _list_level(self, path: str, head: str = "") -> set[str]:
        """The names in a directory that begin with `head`."""
        return {name.rstrip("/") for name in self._list_below(path, head, delimiter="/")} - {""}

    def _list_below(self, path: str, head: str = "", delimiter: str | None = None) -> list[str]:
        prefix = _prefix(path)
        with contextlib.suppress(FileNotFoundError):  # no such bucket
            names = _list_names(path, prefix + head, delimiter=delimiter)
            return [below for name in names if (below := name.removeprefix(prefix))]
        return []


def _list_names(path: str, prefix: str, *, delimiter: str | None = None, most: int | None = None) -> list[str]:
    """The names of objects, and of directories with a `/` behind, of all pages."""
    attempts = Attempts(path)

    def request_pages() -> list[str]:
        listing: Any = client().list_blobs(
            split_path(path)[0],
            prefix=prefix,
            delimiter=delimiter,
            max_results=most,
            fields="items(name),prefixes,nextPageToken",
            retry=None,
            timeout=TIMEOUT,
        )
        names = []
        for page in listing.pages:
            attempts.record_progress()
            names += [found.name for found in page]
        return [*names, *listing.prefixes]

    return persist(path, request_pages, attempts)


def _prefix(path: str) -> str:
    """Returns the prefix of the names below a directory."""
    name = split_path(path)[1].rstrip("/")
    return f"{name}/" if name else ""
