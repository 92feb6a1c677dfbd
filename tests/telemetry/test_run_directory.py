"""The names in a run directory are a contract."""

from __future__ import annotations

import pathlib

import pytest

from tfdist.errors import UserError
from tfdist.telemetry.run_directory import RunDirectory


@pytest.mark.parametrize("path", ["/runs/digits", "/runs/digits/", "gs://bucket/digits"])
def test_the_paths_are_those_of_the_contract(path: str) -> None:
    run = RunDirectory(path)
    root = path.rstrip("/")
    assert run.config == f"{root}/config.gin"
    assert run.result == f"{root}/result.json"
    assert run.metrics == f"{root}/metrics.jsonl"
    assert run.events == f"{root}/events.jsonl"
    assert run.worker_events(3) == f"{root}/events-worker-3.jsonl"
    assert run.tensorboard == f"{root}/tensorboard"
    assert run.checkpoints == f"{root}/checkpoints"
    assert run.export == f"{root}/export"
    assert run.model == f"{root}/export/model.keras"


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert RunDirectory("~/run").path == "/home/somebody/run"


@pytest.mark.slow
def test_create_makes_the_directory_or_says_why_not(tmp_path: pathlib.Path) -> None:
    RunDirectory(str(tmp_path / "new" / "run")).create()
    assert (tmp_path / "new" / "run").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        RunDirectory(str(tmp_path / "file")).create()
