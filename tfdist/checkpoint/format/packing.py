"""Compresses the data files of a checkpoint with blosc2.

Invariant: unpacking gives back the bytes that were packed. A packed file is a blosc2 frame
(https://github.com/Blosc/c-blosc2/blob/main/README_CFRAME_FORMAT.rst) of a safetensors file. The writer packs, restore
unpacks.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.errors import UserError, missing_extra

NONE, LZ4, ZSTD = "none", "blosc2-lz4", "blosc2-zstd"
PACKINGS = {"none": NONE, "lz4": LZ4, "zstd": ZSTD}  # by what the policy calls them
_CHUNK_BYTES = 2**20  # the codec may hold Python's lock meanwhile: a millisecond or two


def suffix(packing: str) -> str:
    """What a packed file's name ends with."""
    return "" if packing == NONE else ".blosc2"


def require(packing: str) -> None:
    """Raises UserError unless the library that `packing` needs is installed."""
    if packing != NONE and importlib.util.find_spec("blosc2") is None:
        raise missing_extra("blosc2", "compression", "compressing checkpoints")


def pack(parts: Sequence[memoryview], packing: str, *, item_bytes: int) -> bytes:
    """The parts, one behind the other, compressed.

    Args:
      parts: what to pack.
      packing: how.
      item_bytes: the size of most numbers in them.
    """
    blosc2 = _library()
    frame = blosc2.SChunk(
        chunksize=_CHUNK_BYTES,
        contiguous=True,
        cparams=_settings(blosc2, packing, item_bytes),
        dparams=blosc2.DParams(nthreads=1),
    )
    for chunk in _chunks(parts):
        frame.append_data(chunk)
        time.sleep(0)  # gives Python's lock away
    return frame.to_cframe()


def unpack(data: memoryview, packing: str, *, most_bytes: int) -> memoryview:
    """The bytes that `pack` was given; raises UserError for a packing it does not know.

    Raises DamagedCheckpoint for what is no frame, or claims to hold more than `most_bytes`: a few bytes can claim
    anything.
    """
    if packing not in PACKINGS.values():
        known = ", ".join(PACKINGS.values())
        raise UserError(f"packed as {packing!r}; this tfdist knows {known}. Use the one that wrote it.")
    if packing == NONE:
        return data
    require(packing)
    try:
        frame = _library().schunk_from_cframe(data, copy=False)
        if not 0 <= frame.nbytes <= most_bytes:
            raise DamagedCheckpoint(f"it claims to hold {frame.nbytes:,} bytes, where at most {most_bytes:,} can be")
        unpacked = np.empty(frame.nbytes, np.uint8)
        for index in range(frame.nchunks):
            frame.decompress_chunk(index, dst=unpacked[index * _CHUNK_BYTES : (index + 1) * _CHUNK_BYTES])
    except (RuntimeError, ValueError) as error:
        raise DamagedCheckpoint(f"it does not unpack: {error}") from error
    return unpacked.data


def _settings(blosc2: ModuleType, packing: str, item_bytes: int) -> Any:
    """Shuffled by bits for lz4, by bytes for zstd: what was measured to be best on weights."""
    codec, order = {
        LZ4: (blosc2.Codec.LZ4, blosc2.Filter.BITSHUFFLE),
        ZSTD: (blosc2.Codec.ZSTD, blosc2.Filter.SHUFFLE),
    }[packing]
    return blosc2.CParams(codec=codec, clevel=1, typesize=item_bytes, filters=[order], nthreads=1)


def _chunks(parts: Sequence[memoryview]) -> Iterator[np.ndarray]:
    """All bytes in pieces of one size, the last aside, each in the same buffer."""
    staged, used = np.empty(_CHUNK_BYTES, np.uint8), 0
    for part in parts:
        view = np.frombuffer(part, np.uint8) if part.nbytes else np.empty(0, np.uint8)
        while view.size:
            count = min(view.size, _CHUNK_BYTES - used)
            staged[used : used + count] = view[:count]
            view, used = view[count:], used + count
            if used == _CHUNK_BYTES:
                yield staged
                used = 0
    if used:
        yield staged[:used]


def _library() -> ModuleType:
    import blosc2

    return blosc2
