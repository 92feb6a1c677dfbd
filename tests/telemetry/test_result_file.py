"""result.json: what a program may believe about a run."""

from __future__ import annotations

import datetime
import json
import pathlib
import platform

import pytest
from support import run_python

from tfdist.telemetry.result import RunResult, Start, versions, write_result
from tfdist.telemetry.run_directory import RunDirectory

_KEYS = [
    "status",
    "mode",
    "end_reason",
    "stopped_by",
    "strategy",
    "num_workers",
    "num_replicas",
    "global_batch_size",
    "steps",
    "epochs",
    "steps_per_epoch",
    "examples_seen",
    "train_metrics",
    "eval_metrics",
    "best",
    "resumed_from_step",
    "starts",
    "goodput",
    "seconds",
    "checkpoint_step",
    "wall_seconds",
    "examples_per_second",
    "hardware",
    "notes",
    "versions",
]


def _result() -> RunResult:
    return RunResult(
        status="done",
        end_reason="completed",
        stopped_by=None,
        strategy="mirrored",
        num_workers=1,
        num_replicas=2,
        global_batch_size=64,
        steps=230,
        epochs=10,
        steps_per_epoch=23,
        examples_seen=14370,
        train_metrics={"loss": float("nan")},
        eval_metrics={"accuracy": 0.97},
        best={"metric": "val_accuracy", "value": 0.97, "epoch": 9, "step": 207},
        resumed_from_step=None,
        starts=[Start(datetime.datetime(2026, 11, 21, 14, 47, 13, tzinfo=datetime.UTC), 0)],
        goodput=0.75,
        seconds={"compute": 9.375},
        checkpoint_step=230,
        wall_seconds=12.5,
        examples_per_second=1150.0,
        versions=versions(),
        hardware={"devices": {"CPU": 2}, "accelerators": {}, "cpus": 2, "memory_bytes": 2**33},
    )


def test_the_file_holds_the_keys_of_the_contract(tmp_path: pathlib.Path) -> None:
    write_result(RunDirectory(str(tmp_path)), _result())
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert list(result) == _KEYS
    assert result["status"] == "done"
    assert result["train_metrics"] == {"loss": "nan"}
    assert result["eval_metrics"] == {"accuracy": 0.97}
    assert result["resumed_from_step"] is None
    assert result["starts"] == [{"time": "2026-11-21T14:47:13.000+00:00", "step": 0, "lost_steps": 0, "end": None}]
    assert result["versions"]["python"] == platform.python_version()
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_result(RunDirectory(str(tmp_path / "missing")), _result())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_versions_are_known_without_importing_anything_heavy() -> None:
    script = "import sys; from tfdist.telemetry.result import versions; print(*versions()); print(*sys.modules)"
    found, modules = run_python(["-c", script]).check().stdout.splitlines()
    assert found.split() == ["python", "tensorflow", "keras", "numpy", "tfdist"]
    assert {"tensorflow", "keras", "horovod", "rich"}.isdisjoint(modules.split())
    assert versions()["tensorflow"][0].isdigit()
