"""Every file of a checkpoint, cut off and with single bits flipped: always noticed, and the one before it used."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator

import pytest
from checkpoint.checkpoints import Listener, assert_same, save_steps, state_of

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints, verify
from tfdist.checkpoint.format.manifest import DamagedCheckpoint

CUTS_PER_FILE = 40
FLIPS_PER_FILE = 100


@pytest.mark.slow
def test_damage_is_always_noticed_and_the_checkpoint_before_is_used(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, 1, 2, max_file_bytes=4096)
    damaged = pathlib.Path(list_checkpoints(str(tmp_path))[1].path)
    names = sorted(path.name for path in damaged.iterdir())
    assert len(names) == 3  # the manifest among them
    num_cases = 0
    for name in names:
        whole = (damaged / name).read_bytes()
        for content in _damages(whole, random.Random(name)):
            (damaged / name).write_bytes(content)
            listener = Listener()
            assert_same(restore.load_newest(str(tmp_path), tell=listener), state_of(1))
            assert len(listener.warnings) == 1
            assert f"Passed over the checkpoint of step 2: {name}" in listener.warnings[0]
            num_cases += 1
        (damaged / name).write_bytes(whole)
    assert num_cases == len(names) * (CUTS_PER_FILE + FLIPS_PER_FILE)
    assert_same(restore.load_newest(str(tmp_path), tell=Listener()), state_of(2))


@pytest.mark.slow
def test_every_bit_of_a_manifest_counts(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, 1)
    path = pathlib.Path(list_checkpoints(str(tmp_path))[0].path) / "manifest.json"
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        path.write_bytes(_flipped(whole, bit))
        assert verify(list_checkpoints(str(tmp_path))[0]) is not None


def test_what_is_wrong_is_said_with_its_figures(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, 1)
    entry = list_checkpoints(str(tmp_path))[0]
    path = pathlib.Path(entry.path) / entry.manifest.files[0].name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert verify(entry) == f"{path.name}: it has {len(whole) - 1:,} bytes instead of {len(whole):,}"
    path.write_bytes(_flipped(whole, 999))
    assert "its checksum is" in verify(entry)
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=rf"{path.name}: it is missing \(.*{entry.path}\)"):
        restore.load(entry.path)
    (path.parent / "manifest.json").write_bytes(b"")
    listener = Listener()
    assert restore.load_newest(str(tmp_path), tell=listener) is None and len(listener.warnings) == 1


def _damages(whole: bytes, chance: random.Random) -> Iterator[bytes]:
    for _ in range(CUTS_PER_FILE):
        yield whole[: chance.randrange(len(whole))]
    for _ in range(FLIPS_PER_FILE):
        yield _flipped(whole, chance.randrange(8 * len(whole)))


def _flipped(whole: bytes, bit: int) -> bytes:
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
