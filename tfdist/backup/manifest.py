"""The manifest of a backup: what it holds, with the size and the checksum of every file.

Invariant: a manifest that decodes is the one that was written, bit for bit, as it carries a checksum of itself. It is
stored last: a step without a valid one does not exist. The writer makes it; catalog and restore read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A data file: its name in the backup's directory, size and CRC32C as stored, and how it is packed."""

    name: str
    num_bytes: int
    crc32c: int
    packing: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a backup says of itself. `created` is ISO 8601 in UTC; the rest as `BackupKeeper` was given it."""

    step: int
    created: str
    identity: Mapping[str, Any]
    metrics: Mapping[str, float]
    values: Mapping[str, Any]
    files: tuple[StoredFile, ...]
    num_tensors: int
    num_tensor_bytes: int
