"""The data files of a checkpoint, in the safetensors format: how tensors lie in them, and how they are read.

Invariant: what `plan` lays out is a valid safetensors file (https://github.com/huggingface/safetensors#format): eight
bytes with the header's length, the header in JSON, then the tensors without holes. The data begins at a multiple of 64
bytes, as does every tensor whose size is such a multiple; the others begin at a multiple of their item's size. The
snapshot plans with this, restore reads with it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.errors import UserError
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
        return self.dtype.itemsize * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """One file: its header, and where behind it each tensor begins."""

    header: bytes
    offsets: tuple[tuple[TensorSpec, int], ...]
    num_bytes: int  # behind the header

    @property
    def item_bytes(self) -> int:
        """The size of most of its items, which a byte shuffle wants to know."""
        return self.offsets[0][0].dtype.itemsize if self.offsets else 1


def plan(specs: Iterable[TensorSpec], *, max_file_bytes: int) -> list[FilePlan]:
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
        header_bytes = int.from_bytes(data[:8], "little")
        header = from_json(bytes(data[8 : 8 + header_bytes]))
        body = data[8 + header_bytes :]
        return {name: _array(body, entry) for name, entry in header.items() if name != "__metadata__"}
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


def _array(body: memoryview, entry: dict[str, Any]) -> np.ndarray:
    first, end = entry["data_offsets"]
    return np.frombuffer(body[first:end], np.uint8).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
