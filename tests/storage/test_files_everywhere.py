"""The same words mean the same on a local path and on gs://."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib

import numpy as np
import pytest
from gcs.server import GcsServer

from tfdist.storage import contents, files, gcs_transfers, local_files

LARGE_BYTES = 3 * (1 << 20) + 5


@pytest.fixture(params=["local", "gs"])
def root(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory; on gs:// large reads begin at a quarter of a megabyte, so that tests stay small."""
    if request.param == "local":
        return str(tmp_path)
    request.getfixturevalue("gcs")
    monkeypatch.setattr(gcs_transfers, "RANGE_BYTES", 1 << 18)
    return "gs://bucket/run"


@pytest.fixture
def large() -> np.ndarray:
    return np.frombuffer(os.urandom(LARGE_BYTES), np.uint8)


def test_a_file_is_written_replaced_and_read(root: str) -> None:
    path = files.join(root, "a b", "größe?#%.txt")
    files.make_dirs(files.join(root, "a b"))
    for content in (b"", b"one", b"another"):
        files.write_atomic(path, content)
        assert files.read(path) == content
        assert files.list_names(files.join(root, "a b")) == ["größe?#%.txt"]


def test_a_new_file_is_made_of_its_parts_and_only_once(root: str, large: np.ndarray) -> None:
    path = files.join(root, "new")
    writable = large.copy()
    parts = [b"head", memoryview(writable)[:7], writable[7:].view(np.uint8), bytearray(b""), np.arange(3, dtype="<i8")]
    expected = b"head" + large.tobytes() + np.arange(3, dtype="<i8").tobytes()
    assert files.write_new(path, parts) == len(expected)
    assert files.read(path) == expected
    with pytest.raises(FileExistsError):
        files.write_new(path, [b"other"])
    with pytest.raises(FileExistsError):
        files.write_new(path, parts)  # the same content from another writer is another file, too
    assert files.read(path) == expected
    assert files.list_tree(root) == ["new"]


@pytest.mark.parametrize("num_bytes", [10, LARGE_BYTES])
def test_of_racing_writers_one_makes_the_object(gcs: GcsServer, num_bytes: int) -> None:
    root = "gs://bucket/run"
    path = files.join(root, "one")

    def write(n: int) -> int | None:
        try:
            files.write_new(path, [bytes([n]) * num_bytes])
        except FileExistsError:
            return None
        return n

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        [winner] = [n for n in pool.map(write, range(8)) if n is not None]
    assert files.read(path) == bytes([winner]) * num_bytes
    assert files.list_tree(root) == ["one"]


def test_ranges_are_read_and_buffers_filled_as_far_as_the_file_goes(root: str, large: np.ndarray) -> None:
    path, missing = files.join(root, "file"), files.join(root, "missing")
    files.write_new(path, [large], crc32c=contents.crc32c(large))
    for first, count in ((0, 1), (5, 1 << 19), (LARGE_BYTES - 3, 100), (LARGE_BYTES, 1), (2 * LARGE_BYTES, 1), (3, 0)):
        assert files.read_range(path, first, count) == large.tobytes()[first : first + count]
    buffer = np.zeros(LARGE_BYTES // 4, "<i4")
    files.read_into(path, buffer)
    assert np.array_equal(buffer.view(np.uint8), large[: buffer.nbytes])
    with pytest.raises(OSError, match="short") as raised:
        files.read_into(path, np.zeros(LARGE_BYTES + 10, np.uint8))
    assert raised.value.filename == path
    for read in (lambda: files.read_range(missing, 0, 1), lambda: files.read_into(missing, buffer)):
        with pytest.raises(FileNotFoundError):
            read()


def test_a_version_changes_with_the_content(root: str) -> None:
    path = files.join(root, "deep", "file")
    files.make_dirs(files.join(root, "deep"))
    files.write_atomic(path, b"1")
    first = files.stat(path)
    assert (first.path, first.num_bytes) == (path, 1)
    assert files.stat(path) == first
    files.write_atomic(path, b"22")
    assert files.stat(path) != first
    with pytest.raises(FileNotFoundError):
        files.stat(files.join(root, "missing"))
    with pytest.raises(IsADirectoryError):
        files.stat(files.join(root, "deep"))


def test_trees_are_listed_and_removed(root: str) -> None:
    names = ["a", "b/c", "b/d/e", "bb"]
    for name in names:
        files.make_dirs(os.path.dirname(files.join(root, name)))
        files.write_atomic(files.join(root, name), b"x")
    assert files.list_tree(root) == names
    assert files.list_tree(files.join(root, "b")) == ["c", "d/e"]
    assert files.list_names(root) == ["a", "b", "bb"]
    assert (files.is_dir(files.join(root, "b")), files.is_dir(files.join(root, "a"))) == (True, False)
    assert (files.exists(files.join(root, "b")), files.exists(files.join(root, "a"))) == (True, True)
    files.remove_tree(files.join(root, "b"))
    files.remove_tree(files.join(root, "missing"))
    assert files.list_tree(root) == ["a", "bb"]
    assert not files.exists(files.join(root, "b"))
    files.remove(files.join(root, "a"))
    files.remove(files.join(root, "a"))
    assert files.list_tree(root) == ["bb"]
    assert files.list_tree(files.join(root, "missing")) == files.list_names(files.join(root, "missing")) == []
    with pytest.raises(FileNotFoundError):
        files.read(files.join(root, "missing"))


def test_half_written_files_are_not_listed_but_removed(tmp_path: pathlib.Path) -> None:
    (tmp_path / f".file.0123{local_files.TEMPORARY_SUFFIX}").write_bytes(b"half")
    assert files.list_names(tmp_path) == files.list_tree(tmp_path) == files.glob(f"{tmp_path}/.*") == []
    files.remove_tree(tmp_path)
    assert not tmp_path.exists()


def test_patterns_match_within_a_directory(root: str) -> None:
    for name in ("train-00", "train-01", "test-00", "x/train-02", "x/y/z", ".hidden"):
        files.make_dirs(os.path.dirname(files.join(root, name)))
        files.write_atomic(files.join(root, name), b"")

    def found(pattern: str) -> list[str]:
        return [path.removeprefix(f"{root}/") for path in files.glob(files.join(root, pattern))]

    assert found("train-*") == ["train-00", "train-01"]
    assert found("t*-0[0-9]") == ["test-00", "train-00", "train-01"]
    assert found("?/train-*") == ["x/train-02"]
    assert found("*/*/z") == ["x/y/z"]
    assert found("*") == ["test-00", "train-00", "train-01", "x"]
    assert found(".h*") == [".hidden"]
    assert found("test-00") == ["test-00"]
    assert found("missing") == found("missing/*") == []
