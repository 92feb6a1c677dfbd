"""What a crash leaves at each step of a local write: the file whole, or not there."""

from __future__ import annotations

import errno
import pathlib

import pytest
from storage import faulty

from tfdist.storage import files

PARTS = [b"first", b"second", b"third"]


def test_a_new_file_is_whole_or_missing_wherever_the_process_ends(tmp_path: pathlib.Path) -> None:
    whole_after: list[str] = []

    def write(index: int) -> None:
        files.make_dirs(tmp_path / str(index) / "deep")
        files.write_new(tmp_path / str(index) / "deep" / "file", PARTS)

    def check(index: int, crash: str | None) -> None:
        directory = tmp_path / str(index) / "deep"
        names = files.list_names(directory)
        assert names in ([], ["file"])
        if names:
            assert files.read(directory / "file") == b"".join(PARTS)
            whole_after.append(crash or "the end")
        files.remove_tree(directory)
        assert not directory.exists()

    # two directories of two steps, create, two steps a part, fsync, replace, unlink, the directory
    assert faulty.crash_everywhere(write, check) == 4 + 1 + 6 + 1 + 1 + 1 + 1
    assert whole_after == ["unlink", "fsync_directory", "the end"]


def test_a_rewritten_file_is_the_old_or_the_new_one_wherever_the_process_ends(tmp_path: pathlib.Path) -> None:
    def check(index: int, crash: str | None) -> None:
        assert files.read(tmp_path / str(index)) in (b"old", b"new content")

    def write(index: int) -> None:
        (tmp_path / str(index)).write_bytes(b"old")
        files.write_atomic(tmp_path / str(index), b"new content")

    assert faulty.crash_everywhere(write, check) >= 6


def test_a_directory_is_the_old_or_the_new_one_and_a_sweep_leaves_nothing_beside_it(tmp_path: pathlib.Path) -> None:
    """What `--mode=export` replaces."""
    new = {"index": b"new", "deep/data": b"new data"}
    for name, content in new.items():
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / name).write_bytes(content)
    old = {"index": b"old", "gone": b"old"}

    def check(index: int, crash: str | None) -> None:
        found = {
            name: files.read(tmp_path / str(index) / "it" / name)
            for name in files.list_tree(tmp_path / str(index) / "it")
        }
        assert found == new if crash is None else found in (old, new)
        files.remove_stale(f"{tmp_path}/{index}/it/")
        assert [path.name for path in (tmp_path / str(index)).iterdir()] == ["it"]

    def replace(index: int) -> None:
        (tmp_path / str(index) / "it").mkdir(parents=True)
        for name, content in old.items():
            (tmp_path / str(index) / "it" / name).write_bytes(content)
        assert files.replace_tree(tmp_path / str(index) / "it", str(tmp_path / "new"), last="index") == 11

    assert faulty.crash_everywhere(replace, check) >= 16


@pytest.mark.slow
def test_an_error_at_any_step_is_raised_and_leaves_no_file_and_nothing_beside_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "all").mkdir()
    with faulty.installed(all_calls := faulty.FaultyCalls()):
        files.write_new(tmp_path / "all" / "file", PARTS)
    steps = all_calls.reached
    assert steps == ["create", *["write"] * 6, "fsync", "replace", "unlink", "fsync_directory"]
    for index, step in enumerate(steps):
        directory = tmp_path / str(index)
        directory.mkdir()
        calls = faulty.FaultyCalls(index, error=OSError(errno.ENOSPC, "no space"))
        with faulty.installed(calls):
            if step == "unlink":  # of the temporary name: the file itself is whole
                assert files.write_new(directory / "file", PARTS) == 16
                assert files.list_names(directory) == ["file"]
                continue
            with pytest.raises(OSError, match="no space"):
                files.write_new(directory / "file", PARTS)
        assert list(directory.iterdir()) == []
