"""Local files and logs, through the functions that everything else uses; nothing behind a symbolic link is changed."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
from checkpoint.checkpoints import save_steps
from gcs.server import GcsServer
from support import clean_environment

from tfdist.checkpoint import catalog
from tfdist.errors import UserError
from tfdist.storage import contents, files, gcs_transfers, lease, local_files, troubles
from tfdist.storage.troubles import check_writable

_WRITE_FOREVER = """
import itertools, json, sys
from tfdist.storage import files
for n in itertools.count():
    files.write_atomic(sys.argv[1], json.dumps({"n": n, "filling": [n] * 20000}))
    print(n, flush=True)
"""


def test_a_file_is_whole_while_it_is_written_and_after_a_kill_at_any_moment(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.json"
    command = [sys.executable, "-c", _WRITE_FOREVER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_environment()) as writer:
        try:
            reported = [int(writer.stdout.readline())]
            for _ in range(50):
                _assert_whole(path)
        finally:
            writer.kill()
        reported += [int(line) for line in writer.stdout.read().split(b"\n")[:-1]]
    assert _assert_whole(path) >= reported[-1]
    assert files.list_names(tmp_path) == ["state.json"]


def _assert_whole(path: pathlib.Path) -> int:
    content = json.loads(path.read_bytes())
    assert content["filling"] == [content["n"]] * 20000
    return content["n"]


def test_writers_of_one_path_do_not_mix_their_bytes(tmp_path: pathlib.Path) -> None:
    written = [bytes([letter]) * 300_000 for letter in b"abcdefgh"]
    threads = [threading.Thread(target=files.write_atomic, args=(tmp_path / "file", data)) for data in written]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.read(tmp_path / "file") in written
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_text_is_utf_8_and_the_file_is_readable_as_the_umask_says(tmp_path: pathlib.Path) -> None:
    files.write_atomic(tmp_path / "new", "größer")
    (tmp_path / "plain").write_bytes(b"")
    assert files.read(tmp_path / "new") == "größer".encode()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("path", ["s3://bucket/run", "gs:/bucket/run", "gs://", "gs:///run", "file:///run"])
def test_a_path_that_no_store_serves_is_the_users_error(path: str) -> None:
    with pytest.raises(UserError, match="takes local paths and gs://BUCKET/DIRECTORY"):
        files.write_atomic(path, b"")


def test_a_directory_without_permission_is_named(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o555)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may write everywhere
    try:
        with pytest.raises(UserError, match=r"cannot be written: Permission denied \(in .*Give this user write perm"):
            check_writable(tmp_path / "run")
    finally:
        os.seteuid(user)


_APPEND = """
import json, sys
from tfdist.storage import files
log = files.open_log(sys.argv[1])
for n in range(int(sys.argv[3])):
    log.write_line(json.dumps({"writer": int(sys.argv[2]), "n": n, "filling": "x" * 500}))
    print(n, flush=True)
"""


@pytest.mark.slow
def test_processes_that_append_to_one_log_leave_every_line_whole_and_a_kill_loses_none(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    command = [sys.executable, "-c", _APPEND, str(path)]
    writers = [
        subprocess.Popen([*command, str(w), "300"], stdout=subprocess.DEVNULL, env=clean_environment())
        for w in range(2)
    ]
    with subprocess.Popen([*command, "2", "1000000"], stdout=subprocess.PIPE, env=clean_environment()) as killed:
        for _ in range(50):
            killed.stdout.readline()
        killed.kill()
        reported = 50 + killed.stdout.read().count(b"\n")
    assert [writer.wait(60) for writer in writers] == [0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    *whole, cut_off = ([line["n"] for line in lines if line["writer"] == writer] for writer in range(3))
    assert whole == [list(range(300))] * 2
    assert cut_off == list(range(len(cut_off))) and len(cut_off) >= reported


def test_a_log_that_is_opened_while_another_writes_a_line_adds_nothing_to_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    line = "x" * 4_000_000
    log = files.open_log(path)
    writer = threading.Thread(target=lambda: [log.write_line(line) for _ in range(20)])
    writer.start()
    while writer.is_alive():
        files.open_log(path).close()
    log.close()
    assert path.read_text().split("\n") == [line] * 20 + [""]


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"whole": 1}\n{"to')
    log = files.open_log(path)
    log.write_line('{"whole": 2}')
    with pytest.raises(ValueError, match="no line break"):
        log.write_line("two\nlines")
    log.close()
    log.close()
    assert path.read_text() == '{"whole": 1}\n{"to\n{"whole": 2}\n'
    with pytest.raises(ValueError, match="closed"):
        log.write_line("late")


# Symbolic links


@pytest.fixture
def others(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory of somebody else's with a file, and one that a killed writer left."""
    directory = tmp_path / "others"
    (directory / "inner").mkdir(parents=True)
    for name in ("manifest.json", "inner/data", ".data.0123.tfdist-tmp"):
        (directory / name).write_text("theirs")
    return directory


def names_below(directory: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("end", ["", "/"])
def test_a_tree_that_is_a_link_goes_without_what_it_points_to(
    tmp_path: pathlib.Path, others: pathlib.Path, end: str
) -> None:
    before = names_below(others)
    (tmp_path / "link").symlink_to(others)
    files.remove_stale(f"{tmp_path}/link{end}")
    files.remove_tree(f"{tmp_path}/link{end}")
    assert names_below(others) == before
    assert not (tmp_path / "link").is_symlink()


def test_a_linked_checkpoint_that_expires_leaves_the_other_runs_checkpoint(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path / "theirs", 1)
    (theirs,) = catalog.list_checkpoints(str(tmp_path / "theirs"))
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / pathlib.Path(theirs.path).name).symlink_to(theirs.path)
    save_steps(tmp_path / "ours", 2, keep_last=1)
    assert [each.step for each in catalog.list_checkpoints(str(tmp_path / "ours"))] == [2]
    assert catalog.verify(theirs) is None


def test_a_lease_or_a_log_that_is_a_link_is_refused_and_its_target_is_whole(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "thesis.txt"
    target.write_text("two years of work")
    for name in (lease.NAME, "events.jsonl"):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(UserError, match=r"/.lease is a symbolic link, which tfdist does not follow. Remove it"):
        lease.acquire(tmp_path, owner="a training", wait_seconds=0, notify=print)
    with pytest.raises(OSError) as raised:
        files.open_log(tmp_path / "events.jsonl")
    assert "symbolic link: remove it" in str(troubles.explain_failure(raised.value))
    assert target.read_text() == "two years of work"


# On a local path as on gs://


LARGE_BYTES = 3 * (1 << 20) + 5


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large reads begin at a quarter of a megabyte, so that tests stay small."""
    monkeypatch.setattr(gcs_transfers, "RANGE_BYTES", 1 << 18)


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
