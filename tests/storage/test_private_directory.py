"""A directory in a shared place is used only if it is this user's alone."""

from __future__ import annotations

import os
import pathlib

import pytest

from tfdist.storage import private_directory


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
