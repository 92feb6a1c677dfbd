"""Bytes on their way to a store and what is known of those that lie in one: views, checksums, versions.

Invariant: nothing here copies what it is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

TEMPORARY_SUFFIX = ".tfdist-tmp"  # of what is being written, which no listing shows
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


def views(parts: Iterable[Buffer]) -> list[memoryview]:
    """The bytes of each part, without a copy; empty parts are left out.

    Raises:
      TypeError: a part has no bytes that lie in one piece.
    """
    return list(each_view(parts))


def each_view(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    """As `views`, each when it is asked for."""
    return (view for part in parts if (view := memoryview(part).cast("B")).nbytes)


def total_bytes(parts: Sequence[memoryview]) -> int:
    """The size of all parts together."""
    return sum(part.nbytes for part in parts)


def crc32c(*parts: Buffer, seed: int = 0) -> int:
    """The CRC-32C (https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4) of all parts, one behind the other.

    Args:
      parts: with the buffer protocol.
      seed: the checksum of what comes before them.
    """
    import google_crc32c  # a command says in one message that it is missing, once it has begun

    for part in parts:
        # numpy's arrays may be written and still pass for the library, other writable buffers do not
        seed = google_crc32c.extend(seed, np.frombuffer(part, np.uint8)) if len(memoryview(part)) else seed
    return seed
