"""The data files of a checkpoint, in the safetensors format: how tensors lie in them, and how they are read.

Invariant: what `plan_files` lays out is a valid safetensors file
(https://github.com/huggingface/safetensors#format): eight bytes with the header's length, the header in JSON, then the
tensors without holes. The data begins at a multiple of 64 bytes, as does every tensor whose size is such a multiple;
the others begin at a multiple of their item's size. The snapshot plans with this, restore reads with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
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
        """What its content takes."""
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
    with _refuse_damage():
        places = _locate_tensors(data)
        return {name: _make_array(data[first:end], entry) for name, (entry, first, end) in places.items()}


def read_wanted(read: Callable[[int, int], memoryview], wanted: Callable[[str], bool]) -> dict[str, np.ndarray | None]:
    """The wanted tensors of a file, by name, and None for each of the others.

    Args:
      read: gives so many of its bytes from a place on; of tensors that lie side by side it is asked together.
      wanted: whether a tensor is.

    Raises:
      DamagedCheckpoint: it is no such file.
    """
    with _refuse_damage():
        places = _locate_tensors(read(0, 8 + int.from_bytes(read(0, 8), "little")))
    found: dict[str, np.ndarray | None] = dict.fromkeys(places)
    in_order = sorted(places, key=lambda name: places[name][1:])
    for is_wanted, names in itertools.groupby(in_order, wanted):
        if is_wanted:
            group = list(names)
            start = places[group[0]][1]
            data = read(start, places[group[-1]][2] - start)
            with _refuse_damage():
                for name in group:
                    entry, first, end = places[name]
                    found[name] = _make_array(data[first - start : end - start], entry)
    return found


@contextlib.contextmanager
def _refuse_damage() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedCheckpoint(f"it is not a safetensors file: {error}") from error


def _locate_tensors(data: memoryview) -> dict[str, tuple[dict[str, Any], int, int]]:
    """Of a file's first bytes by name what is said of each tensor, and where in the file it begins and ends."""
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = {name: each for name, each in from_json(bytes(data[8:begin])).items() if name != "__metadata__"}
    return {name: (each, *(begin + offset for offset in each["data_offsets"])) for name, each in entries.items()}


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
    array = np.frombuffer(data, np.uint8).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    array.flags.writeable = False
    return array
