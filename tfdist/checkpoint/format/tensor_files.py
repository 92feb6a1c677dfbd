"""The data files of a checkpoint, in the safetensors format: how tensors lie in them, and how they are read.

Invariant: what `plan_files` lays out is a valid safetensors file
(https://github.com/huggingface/safetensors#format): eight bytes with the header's length, the header in JSON, then the
tensors without holes. The data begins at a multiple of 64 bytes, as does every tensor whose size is such a multiple;
the others begin at a multiple of their item's size. Size and CRC32C of every file are found right on the very bytes
that become the arrays, before any of them is handed out. The snapshot plans with this, catalog and restore read with
it.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from tfdist.checkpoint.format.manifest import DamagedCheckpoint, Manifest, StoredFile
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.contents import crc32c
from tfdist.telemetry.json_text import from_json

ALIGNMENT = 64
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_DTYPES = {
    code: np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name) for name, code in _NAMES.items()
}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor without its content."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its content."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """One file: its header, and where behind it each tensor begins."""

    header: bytes
    offsets: tuple[tuple[TensorSpec, int], ...]
    num_bytes: int  # behind the header


def plan_files(specs: Iterable[TensorSpec], *, max_file_bytes: int) -> list[FilePlan]:
    """Spreads tensors over files of at most `max_file_bytes`; a larger tensor stands alone. No tensors, no files.

    Raises UserError for a tensor whose type safetensors does not have.
    """
    ordered = sorted(specs, key=lambda spec: (spec.num_bytes % ALIGNMENT != 0, -spec.dtype.itemsize, spec.name))
    groups: list[list[TensorSpec]] = []
    room = -1
    for spec in ordered:
        if spec.num_bytes > room:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(spec)
        room -= spec.num_bytes
    return [_plan_file(group) for group in groups]


def read(data: memoryview) -> dict[str, np.ndarray]:
    """The tensors of a whole file as arrays over `data`; raises DamagedCheckpoint when it is no such file."""
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        entries = from_json(bytes(data[8:begin]))
        return {name: _make_array(data[begin:], each) for name, each in entries.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedCheckpoint(f"it is not a safetensors file: {error}") from error


def _plan_file(specs: list[TensorSpec]) -> FilePlan:
    offsets, entries, end = [], {}, 0
    for spec in specs:
        offsets.append((spec, end))
        entries[spec.name] = {
            "dtype": _type_name(spec),
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return FilePlan(len(text).to_bytes(8, "little") + text, tuple(offsets), end)


def _type_name(spec: TensorSpec) -> str:
    if spec.dtype.name not in _NAMES or spec.name == "__metadata__":
        raise UserError(
            f"A checkpoint cannot keep the tensor {spec.name!r} of type {spec.dtype.name}. "
            f"It keeps {', '.join(_NAMES)}, under any name but '__metadata__'."
        )
    return _NAMES[spec.dtype.name]


def _make_array(data: memoryview, entry: dict[str, Any]) -> np.ndarray:
    first, end = entry["data_offsets"]
    array = np.frombuffer(data[first:end], np.uint8).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    array.flags.writeable = False
    return array


_MOST_THREADS = 8


def read_files(
    path: str, manifest: Manifest, *, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """The tensors of the checkpoint at `path` that are `wanted`, not to be written to.

    Raises:
      DamagedCheckpoint: naming the file and what was wrong with it.
      OSError: the store does not answer.
    """
    threads = ThreadPoolExecutor(max(1, min(_MOST_THREADS, len(manifest.files))), "tfdist-restore")
    with threads:
        read = [threads.submit(_read_file, path, file, wanted) for file in manifest.files]
        tensors = {name: array for future in read for name, array in future.result().items()}
    if len(tensors) != manifest.num_tensors:
        raise DamagedCheckpoint(f"its files hold {len(tensors):,} tensors instead of {manifest.num_tensors:,}")
    return {name: array for name, array in tensors.items() if array is not None}


def _read_file(path: str, file: StoredFile, wanted: Callable[[str], bool]) -> dict[str, np.ndarray | None]:
    """Reads a file's tensors by name; None for each that is not wanted."""
    try:
        data = _read_bytes(files.join(path, file.name), file.num_bytes)
        if (found := crc32c(data)) != file.crc32c:
            raise DamagedCheckpoint(f"its checksum is {found:08x} instead of {file.crc32c:08x}")
        tensors = read(data)
        kept = {name: array for name, array in tensors.items() if wanted(name)}
        if len(kept) < len(tensors) and files.is_remote(path):  # what is not wanted is to go
            kept = {name: _copy_array(array) for name, array in kept.items()}
        return dict.fromkeys(tensors) | kept
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{file.name}: {error}") from error
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{file.name}: it is missing") from error
    except OSError as error:
        if error.errno != errno.EIO or files.is_remote(path):  # a server that fails may answer tomorrow
            raise
        raise DamagedCheckpoint(f"{file.name}: it cannot be read: {error}") from error


def _copy_array(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _read_bytes(path: str, num_bytes: int) -> memoryview:
    found = files.stat(path).num_bytes
    if found != num_bytes:
        raise DamagedCheckpoint(f"it has {found:,} bytes instead of {num_bytes:,}")
    if not files.is_remote(path):
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ))
    data = np.empty(num_bytes, np.uint8)
    files.read_into(path, data)
    return data.data
