"""result.json: what a program may believe about a run."""

from __future__ import annotations

import json
import pathlib
import platform

import pytest
from support import run_python

from tfdist.telemetry.result import RunResult, versions, write_result
from tfdist.telemetry.run_directory import RunDirectory

_KEYS = [
    "status",
    "strategy",
    "num_workers",
    "num_replicas",
    "global_batch_size",
    "steps",
    "epochs",
    "examples_seen",
    "train_metrics",
    "eval_metrics",
    "resumed_from_step",
    "wall_seconds",
    "examples_per_second",
    "versions",
]


def _result() -> RunResult:
    return RunResult(
        status="done",
        strategy="mirrored",
        num_workers=1,
        num_replicas=2,
        global_batch_size=64,
        steps=230,
        epochs=10,
        examples_seen=14370,
        train_metrics={"loss": float("nan")},
        eval_metrics={"accuracy": 0.97},
        resumed_from_step=None,
        wall_seconds=12.5,
        examples_per_second=1150.0,
    )


def test_the_file_holds_the_keys_of_the_contract(tmp_path: pathlib.Path) -> None:
    write_result(RunDirectory(str(tmp_path)), _result())
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert list(result) == _KEYS
    assert result["status"] == "done"
    assert result["train_metrics"] == {"loss": "nan"}
    assert result["eval_metrics"] == {"accuracy": 0.97}
    assert result["resumed_from_step"] is None
    assert result["versions"]["python"] == platform.python_version()
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_result(RunDirectory(str(tmp_path / "missing")), _result())
    assert list(tmp_path.iterdir()) == []


def test_the_versions_are_known_without_importing_anything_heavy() -> None:
    script = "import sys; from tfdist.telemetry.result import versions; print(*versions()); print(*sys.modules)"
    found, modules = run_python(["-c", script]).check().stdout.splitlines()
    assert found.split() == ["python", "tensorflow", "keras", "numpy", "tfdist"]
    assert {"tensorflow", "keras", "horovod", "rich"}.isdisjoint(modules.split())
    assert versions()["tensorflow"][0].isdigit()
