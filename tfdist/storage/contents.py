"""Bytes on their way to a store and what is known of those that lie in one: views, checksums, versions.

Invariant: nothing here copies what it is given.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

_PIECE_BYTES = 2**20  # of a checksum
Buffer = Any  # what has the buffer protocol: bytes, bytearray, memoryview, a numpy array


@dataclasses.dataclass(frozen=True)
class FileVersion:
    """A file as it is now; another size or time of change means other content.

    Attributes:
      path: as it was asked for.
      num_bytes: its size.
      changed_nanoseconds: when a local file was changed last, in ns since 1970. Of an object its generation, which no
        other content of that name ever has.
    """

    path: str
    num_bytes: int
    changed_nanoseconds: int


def iterate_views(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    """The bytes of each part when it is asked for, without a copy; empty parts are left out.

    Raises:
      TypeError: a part has no bytes that lie in one piece.
    """
    return (view for part in parts if (view := memoryview(part).cast("B")).nbytes)


def crc32c(*parts: Buffer) -> int:
    """The CRC-32C (https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4) of all parts, one behind the other."""
    import google_crc32c  # a command says in one message that it is missing, once it has begun

    checksum = 0
    for view in iterate_views(parts):
        for first in range(0, view.nbytes, _PIECE_BYTES):
            # numpy's arrays may be written and still pass for the library, other writable buffers do not
            piece = np.frombuffer(view[first : first + _PIECE_BYTES], np.uint8)
            checksum = google_crc32c.extend(checksum, piece)
            time.sleep(0)  # gives Python's lock away
    return checksum
