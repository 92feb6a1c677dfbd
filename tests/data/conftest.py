"""What every test of data gets: a cache of its own, so that no index of another test's files is found."""

from __future__ import annotations

import pathlib

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
