"""Run directories that cannot be written end with one message."""

from __future__ import annotations

import pathlib

import pytest
from support import run_python

from tfdist.errors import UserError
from tfdist.storage.troubles import check_writable

_CHECK_WITHOUT_PERMISSION = """
import os, tempfile
from tfdist.errors import UserError
from tfdist.storage.troubles import check_writable
with tempfile.TemporaryDirectory() as directory:
    os.chmod(directory, 0o555)
    if os.geteuid() == 0:  # who may write everywhere
        os.seteuid(65534)
    try:
        check_writable(directory + "/run")
    except UserError as error:
        print(error)
    os.seteuid(os.getuid())
"""


def test_a_directory_that_can_be_written_is_made_and_left_empty(tmp_path: pathlib.Path) -> None:
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("below", ["", "run", "run/deeper"])
def test_a_file_in_the_way_is_named(tmp_path: pathlib.Path, below: str) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(UserError) as raised:
        check_writable(tmp_path / "taken" / below)
    assert f"'{tmp_path}/taken' is a file." in str(raised.value)
    assert "Choose another run directory" in str(raised.value)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_directory_without_permission_is_named() -> None:
    message = run_python(["-c", _CHECK_WITHOUT_PERMISSION]).check().stdout
    assert "cannot be written: Permission denied (in " in message
    assert "Give this user write permission there" in message


@pytest.mark.parametrize(
    ("path", "message"),
    [("", "The run directory is empty"), ("/proc/run", r"'/proc/run' cannot be written: .* \(in '/proc'\)\. Choose")],
)
def test_a_path_that_takes_no_files_is_named(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_writable(path)
