"""Damage and crashes at every place: always noticed, and the newest whole checkpoint restores."""

from __future__ import annotations

import pathlib
import random

import pytest
from checkpoint.checkpoints import Listener, assert_same, save_steps, state_of, steps
from storage import faulty

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
        chance = random.Random(name)
        damages = [whole[: chance.randrange(len(whole))] for _ in range(CUTS_PER_FILE)]
        damages += [_flipped(whole, chance.randrange(8 * len(whole))) for _ in range(FLIPS_PER_FILE)]
        for content in damages:
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


def _flipped(whole: bytes, bit: int) -> bytes:
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


# Crashes


@pytest.mark.slow
def test_wherever_a_save_is_cut_off_the_newest_whole_checkpoint_restores(tmp_path: pathlib.Path) -> None:
    """A removal that is cut off leaves the whole checkpoint or a leftover."""
    restored_steps: list[int] = []

    def function(index: int) -> None:
        with faulty.installed(faulty.Calls()):
            save_steps(tmp_path / str(index), 1)
            (tmp_path / str(index) / "step-000000000002-0123456789ab").mkdir()
            (tmp_path / str(index) / "notes.txt").write_text("of the user")
        # The first finds a leftover, and both have something to prune.
        save_steps(tmp_path / str(index), 2, 3, keep_last=1)

    def check(index: int, crash: str | None) -> None:
        directory, listener = tmp_path / str(index), Listener()
        restored = restore.load_newest(str(directory), tell=listener)
        assert_same(restored, state_of(restored.step))
        assert listener.warnings == []  # a torn checkpoint does not exist, so there is nothing to pass over
        restored_steps.append(restored.step)
        for entry in list_checkpoints(str(directory)):
            if not entry.is_leftover:
                assert_same(restore.load(entry.path), state_of(entry.step))
        _train_on(directory, after=restored.step)

    num_boundaries = faulty.crash_everywhere(function, check)
    assert num_boundaries > 50
    assert restored_steps == sorted(restored_steps)  # the later the crash, the later the step
    assert set(restored_steps) == {1, 2, 3}


def _train_on(directory: pathlib.Path, *, after: int) -> None:
    """The next start, which does the lost steps once more."""
    save_steps(directory, *range(after + 1, 5), keep_last=1)
    assert steps(list_checkpoints(str(directory))) == [4]
    (entry,) = list_checkpoints(str(directory))
    assert {str(path) for path in directory.iterdir()} == {entry.path, str(directory / "notes.txt")}
