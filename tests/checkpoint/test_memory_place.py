"""Checkpoints in memory: a run finds its own directory there, and neither reads nor removes anything else."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from tfdist.checkpoint.write.memory import MemoryPlace
from tfdist.storage import private_directory


@pytest.fixture
def memory(tmp_path: pathlib.Path) -> pathlib.Path:
    (made := tmp_path / "memory").mkdir()
    return made


def place(run: pathlib.Path, memory: pathlib.Path) -> MemoryPlace:
    run.mkdir(exist_ok=True)
    return MemoryPlace(str(run / "memory.json"), str(memory))


def test_a_run_finds_its_own_and_no_copy_of_it_does(tmp_path: pathlib.Path, memory: pathlib.Path) -> None:
    made = place(tmp_path / "run", memory).open()
    assert place(tmp_path / "run", memory).find() == made and os.stat(made).st_mode & 0o777 == 0o700
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "memory.json").write_bytes((tmp_path / "run" / "memory.json").read_bytes())
    copy = place(tmp_path / "copy", memory)
    assert copy.find() is None and copy.left_alone() == made
    assert copy.open() != made and place(tmp_path / "run", memory).find() == made


def test_only_a_private_directory_in_its_place_is_taken(tmp_path: pathlib.Path, memory: pathlib.Path) -> None:
    run = tmp_path / "run"
    made = pathlib.Path(place(run, memory).open())
    elsewhere = tmp_path / "tfdist-precious"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "run").write_bytes((made / "run").read_bytes())
    (memory / "tfdist-link00").symlink_to(elsewhere)
    (memory / "other-abcdefgh").mkdir(mode=0o700)
    for named in (
        str(elsewhere),
        str(memory / "tfdist-link00"),
        str(memory / "other-abcdefgh"),
        f"{memory}/../{elsewhere.name}",
        f"{made}/",
        f"{made}/../{made.name}",
        "",
        5,
        ["x"],
        None,
    ):
        (run / "memory.json").write_text(json.dumps({"directory": named}))
        assert place(run, memory).find() is None, named
    for text in ("[" * 100_000, "[]", "5", "\x00"):
        (run / "memory.json").write_text(text)
        assert place(run, memory).find() is None
    (run / "memory.json").write_text(json.dumps({"directory": str(made)}))
    assert place(run, memory).find() == str(made)
    made.chmod(0o750)
    assert place(run, memory).find() is None and place(run, memory).left_alone() == str(made)


@pytest.mark.slow
def test_what_belongs_to_somebody_else_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "shared" / "mine")
    private_directory.make(path)
    private_directory.make(path)
    assert os.stat(path).st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match=f"it belongs to user {os.geteuid()}"):
        private_directory.make(path)
    monkeypatch.undo()
    os.chmod(path, 0o770)
    with pytest.raises(PermissionError, match=r"others may use it \(mode 0770\)"):
        private_directory.make(path)
    os.rmdir(path)
    os.symlink(tmp_path, path)
    with pytest.raises(PermissionError, match="a link to one"):
        private_directory.make(path)
