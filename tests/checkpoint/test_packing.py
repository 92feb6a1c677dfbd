"""Compression: what goes in comes out, and it shrinks what can be shrunk."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest
from checkpoint.checkpoints import Listener, assert_same, new_manager

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.checkpoint.format import packing
from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.checkpoint.state import State
from tfdist.errors import UserError

MIB = 2**20


@pytest.mark.parametrize("packed_as", [packing.LZ4, packing.ZSTD])
@pytest.mark.parametrize("sizes", [[0], [1], [64, 3], [100, MIB], [MIB - 1, 1], [700_000, 5, 2 * MIB, 0, 7]])
def test_what_was_packed_is_unpacked(packed_as: str, sizes: list[int]) -> None:
    random = np.random.default_rng(0)
    parts = [memoryview(random.integers(0, 4, size, dtype=np.uint8)) for size in sizes]
    packed = packing.pack(parts, packed_as, item_bytes=4)
    assert bytes(packing.unpack(memoryview(packed), packed_as, most_bytes=1 << 30)) == b"".join(
        bytes(part) for part in parts
    )


@pytest.mark.parametrize(("compression", "name"), [("lz4", "blosc2-lz4"), ("zstd", "blosc2-zstd")])
def test_a_compressed_checkpoint_takes_less_room_and_restores(
    tmp_path: pathlib.Path, compression: str, name: str
) -> None:
    weights = np.random.default_rng(0).normal(size=500_000).astype(np.float32)
    state = State(1, {"weights": weights}, {})
    manager = new_manager(tmp_path, compression=compression, on_error="stop")
    manager.save(state)
    manager.close()
    (entry,) = list_checkpoints(str(tmp_path))
    assert entry.manifest.num_stored_bytes < 0.95 * weights.nbytes
    assert [(file.packing, file.name.endswith(".safetensors.blosc2")) for file in entry.manifest.files] == [
        (name, True)
    ]
    assert_same(restore.newest(str(tmp_path), tell=Listener()), state)


def test_without_the_library_its_extra_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)
    with pytest.raises(UserError, match=r"pip install 'tfdist\[compression\]'"):
        new_manager(tmp_path, compression="zstd")


@pytest.mark.slow
def test_an_unknown_packing_and_a_broken_frame_are_told() -> None:
    with pytest.raises(UserError, match="packed as 'brotli'"):
        packing.unpack(memoryview(b"x"), "brotli", most_bytes=9)
    packed = packing.pack([memoryview(bytes(4 * MIB))], packing.LZ4, item_bytes=4)
    assert len(packed) < MIB
    with pytest.raises(DamagedCheckpoint, match=r"claims to hold 4,194,304 bytes, where at most 4,194,303"):
        packing.unpack(memoryview(packed), packing.LZ4, most_bytes=4 * MIB - 1)
    with pytest.raises(DamagedCheckpoint, match="does not unpack"):
        packing.unpack(memoryview(b"no frame at all" * 10), packing.ZSTD, most_bytes=9)
