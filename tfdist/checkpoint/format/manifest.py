"""The manifest of a checkpoint: what it holds, with the size and the checksum of every file.

Invariant: a manifest that decodes is the one that was written, bit for bit, as it carries a checksum of itself, and the
files that it names lie in the checkpoint's own directory, whoever wrote it. It is stored last: a step without a valid
one does not exist. The writer makes it; catalog and restore read it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from tfdist.errors import UserError
from tfdist.storage import contents
from tfdist.telemetry.json_text import from_json
from tfdist.telemetry.records import as_type

NAME = "manifest.json"
FORMAT = 1
_KEY = b',"manifest_crc32c":'  # the last one, whose value covers all that stands before it
_SUFFIX_BYTES = len(_KEY) + len(b'"00000000"}\n')
_FLOAT = "$float"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")  # of a file, never of a path
_MOST_BYTES = 2**53
UNPACKED = "none"


class DamagedCheckpoint(UserError):
    """A checkpoint, or a part of it, is not what was written. The message names the file and what was wrong."""

    error_id = "damaged-checkpoint"


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A data file: its name in the checkpoint's directory, its size and CRC32C; `packing` is always UNPACKED."""

    name: str
    num_bytes: int
    crc32c: int
    packing: str = UNPACKED


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint. `created` is ISO 8601 in UTC; the rest as `CheckpointManager` was given it."""

    step: int
    created: str
    identity: Mapping[str, Any]
    metrics: Mapping[str, float]
    values: Mapping[str, Any]
    files: tuple[StoredFile, ...]
    num_tensors: int
    num_tensor_bytes: int

    @property
    def num_stored_bytes(self) -> int:
        """The size of the data files in the store."""
        return sum(file.num_bytes for file in self.files)


def encode(manifest: Manifest) -> bytes:
    """The JSON text that is stored; raises UserError for what `to_plain` refuses."""
    body = json.dumps(
        {"format": FORMAT, **to_plain(dataclasses.asdict(manifest))}, allow_nan=False, separators=(",", ":")
    ).encode()
    return body[:-1] + _suffix(body[:-1])


def decode(data: bytes) -> Manifest:
    """Reads what `encode` made; raises DamagedCheckpoint when a single bit differs, UserError for a later format."""
    body, suffix = data[:-_SUFFIX_BYTES], data[-_SUFFIX_BYTES:]
    if not suffix.startswith(_KEY) or not suffix.endswith(b'"}\n'):
        raise DamagedCheckpoint(f"{NAME} is cut off: of its {len(data):,} bytes the last are not its checksum")
    if suffix != _suffix(body):
        raise DamagedCheckpoint(f"{NAME} does not match its checksum")
    try:
        fields = from_plain(from_json(body + b"}"))
        version = fields.pop("format")
        if version != FORMAT:
            raise UserError(
                f"{NAME} is of format {str(version)[:20]}; this tfdist reads format {FORMAT}. Use the one that wrote "
                "it."
            )
        manifest = as_type(Manifest, fields)
        _check(manifest, fields)
        manifest = dataclasses.replace(manifest, files=tuple(manifest.files))
        if packed := [file.packing for file in manifest.files if file.packing != UNPACKED]:
            raise UserError(f"Its files are packed as {str(packed[0])[:20]!r}. Use the tfdist that wrote it.")
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{NAME} is no manifest of a checkpoint: {str(error)[:200]}") from error
    return manifest


def _check(manifest: Manifest, fields: Mapping[str, Any]) -> None:
    """Raises ValueError for fields that no writer writes: the checksum shows only that the file is whole."""
    counts = [manifest.step, manifest.num_tensors, manifest.num_tensor_bytes]
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name) or file.name == NAME:
            raise ValueError(f"it names {file.name!r}, which is no name of a file in the checkpoint's directory")
        counts += [file.num_bytes, file.crc32c]
        if file.num_bytes == 0:
            raise ValueError(f"{file.name} is empty, and holds tensors")
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise ValueError("it names a file twice")
    if not all(0 <= count <= _MOST_BYTES for count in counts):
        raise ValueError("one of its sizes or counts is too large, or below 0")
    if dataclasses.asdict(manifest) != fields:
        raise ValueError("it has fields that no manifest has")


def to_plain(value: Any, path: str = "") -> Any:
    """Converts `value` to JSON, exactly: floats that JSON has no number for, too; NumPy's numbers as Python's.

    Raises UserError that names the path of what cannot be kept.
    """
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # a number of NumPy
        value = value.item()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_plain(item, f"{path}.{key}" if path else key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    raise UserError(
        f"A checkpoint cannot keep {path or 'this'}: it is a {type(value).__name__}, {str(value)[:80]!r}. It keeps "
        "None, bool, int, float, str, and lists and dicts (with keys of str) of these; arrays belong among the tensors."
    )


def from_plain(value: Any) -> Any:
    """Converts back what `to_plain` returned."""
    if isinstance(value, dict):
        if value.keys() == {_FLOAT}:
            return float(value[_FLOAT])
        return {key: from_plain(item) for key, item in value.items()}
    return [from_plain(item) for item in value] if isinstance(value, list) else value


def _suffix(body: bytes) -> bytes:
    return _KEY + b'"%08x"}\n' % contents.crc32c(body)
