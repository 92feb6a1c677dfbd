"""Symbolic links in a run directory: nothing behind one is removed, cut or added to."""

from __future__ import annotations

import pathlib

import pytest
from checkpoint.checkpoints import save_steps

from tfdist.checkpoint import catalog
from tfdist.errors import UserError
from tfdist.storage import files, lease, troubles


@pytest.fixture
def others(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory of somebody else's with a file, and one that a killed writer left."""
    directory = tmp_path / "others"
    (directory / "inner").mkdir(parents=True)
    for name in ("manifest.json", "inner/data", ".data.0123.tfdist-tmp"):
        (directory / name).write_text("theirs")
    return directory


def contents(directory: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("end", ["", "/"])
def test_a_tree_that_is_a_link_goes_without_what_it_points_to(
    tmp_path: pathlib.Path, others: pathlib.Path, end: str
) -> None:
    before = contents(others)
    (tmp_path / "link").symlink_to(others)
    files.remove_stale(f"{tmp_path}/link{end}")
    files.remove_tree(f"{tmp_path}/link{end}")
    assert contents(others) == before
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
