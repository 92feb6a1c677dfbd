"""Compression: what goes in comes out, it shrinks what can be shrunk, and it is used where it pays."""

from __future__ import annotations

import pathlib

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


def test_compression_is_chosen_for_a_slow_store_and_not_for_a_fast_one() -> None:
    data = memoryview(np.zeros(4 * MIB, np.uint8))
    slow, figures = packing.choose(data, item_bytes=4, write_bytes_per_second=1000)
    assert slow in (packing.LZ4, packing.ZSTD)
    assert figures[packing.LZ4]["ratio"] < 0.1
    assert packing.choose(data, item_bytes=4, write_bytes_per_second=5e9)[0] == packing.NONE


def test_what_does_not_shrink_is_stored_as_it_is_even_on_a_slow_store() -> None:
    noise = memoryview(np.random.default_rng(0).integers(0, 256, 4 * MIB, dtype=np.uint8))
    assert packing.choose(noise, item_bytes=4, write_bytes_per_second=1000)[0] == packing.NONE


def test_auto_decides_after_the_first_checkpoint(tmp_path: pathlib.Path) -> None:
    listener = Listener()
    manager = new_manager(tmp_path, listener, compression="auto")
    manager.save(State(1, {"weights": np.zeros(MIB, np.float32)}, {}))
    manager.save(State(2, {"weights": np.zeros(MIB, np.float32)}, {}))
    manager.close()
    first, second = list_checkpoints(str(tmp_path))
    assert first.manifest.files[0].packing == "none"
    assert second.manifest.files[0].packing in packing.PACKINGS
    assert len(listener.events("checkpoint_compression")) == 1


def test_without_the_library_its_extra_is_named_and_auto_does_without(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "is_installed", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'tfdist\[compression\]'"):
        new_manager(tmp_path, compression="zstd")
    data = memoryview(np.zeros(MIB, np.uint8))
    assert packing.choose(data, item_bytes=4, write_bytes_per_second=1000)[0] == packing.NONE


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
