"""What the environment of a process says of a home."""

from __future__ import annotations

import os
import pathlib

import pytest

from tfdist.errors import UserError
from tfdist.strategies.cluster import environment
from tfdist.telemetry.run_directory import RunDirectory


def test_a_user_without_a_home_gets_no_directory_of_the_name_of_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and without an entry in passwd
    cache = environment.cache_directory()
    assert os.path.isabs(cache) and cache == environment.cache_directory()
    with pytest.raises(UserError, match="this user has no home"):
        RunDirectory("~/runs/a")
