"""metrics.jsonl and TensorBoard summaries."""

from __future__ import annotations

import gc
import json
import os
import pathlib

import numpy as np
import pytest
from gcs.server import GcsServer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.logs.metrics import MetricsLog
from tfdist.telemetry.run_directory import RunDirectory


def _read(path: pathlib.Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_point_is_one_object_with_every_metric_beside_the_keys_of_the_contract(tmp_path: pathlib.Path) -> None:
    log = MetricsLog(RunDirectory(str(tmp_path)), tensorboard=False)
    log.log(step=10, epoch=1, split="train", metrics={"loss": 0.5, "grad_norm": float("inf")}, learning_rate=0.1)
    log.log(step=10, epoch=1, split="eval", metrics={"loss": np.float32(0.25), "per_class": np.array([0.5, 1.0])})
    log.close()
    assert _read(tmp_path / "metrics.jsonl") == [
        {"step": 10, "epoch": 1, "split": "train", "learning_rate": 0.1, "loss": 0.5, "grad_norm": "inf"},
        {"step": 10, "epoch": 1, "split": "eval", "learning_rate": None, "loss": 0.25, "per_class": [0.5, 1.0]},
    ]
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_reads_the_scalars_of_every_split(tmp_path: pathlib.Path) -> None:
    log = MetricsLog(RunDirectory(str(tmp_path)))
    for step in (1, 2):
        log.log(step=step, epoch=1, split="train", metrics={"loss": 1 / step, "vector": [1, 2]}, learning_rate=0.1)
    log.log(step=2, epoch=1, split="eval", metrics={"loss": float("nan")})
    log.close()
    assert _scalars(tmp_path / "tensorboard" / "train") == {
        "loss": [(1, 1.0), (2, 0.5)],
        "learning_rate": [(1, pytest.approx(0.1)), (2, pytest.approx(0.1))],
    }
    assert _scalars(tmp_path / "tensorboard" / "eval") == {"loss": [(2, pytest.approx(float("nan"), nan_ok=True))]}


def test_a_bucket_gets_the_same_metrics_and_summaries(gcs: GcsServer, tmp_path: pathlib.Path) -> None:
    log = MetricsLog(RunDirectory("gs://bucket/run"), config_text="train.epochs = 2\n")
    log.log(step=1, epoch=1, split="train", metrics={"loss": 0.5})
    log.log(step=1, epoch=1, split="eval", metrics={"loss": 0.25})
    log.close()
    for name in files.list_tree("gs://bucket/run"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(files.read(f"gs://bucket/run/{name}"))
    assert [point["loss"] for point in _read(tmp_path / "metrics.jsonl")] == [0.5, 0.25]
    assert _scalars(tmp_path / "tensorboard" / "train") == {"loss": [(1, 0.5)]}
    assert _scalars(tmp_path / "tensorboard" / "eval") == {"loss": [(1, 0.25)]}
    assert files.list_names("gs://bucket/run/tensorboard") == ["eval", "events.out.tfevents.0.config", "train"]
    (text,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("config.gin")
    assert make_ndarray(text.tensor_proto).item() == b"    train.epochs = 2\n"


def _scalars(directory: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(directory)).Reload()
    tags = events.Tags()["tensors"]
    return {tag: [(e.step, float(make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)] for tag in tags}


def test_a_resumed_run_takes_back_the_points_that_it_will_pass_again(tmp_path: pathlib.Path) -> None:
    run = RunDirectory(str(tmp_path))
    MetricsLog(run).discard_after(0)
    killed = MetricsLog(run, tensorboard=False)
    for step in (10, 20, 30):
        killed.log(step=step, epoch=1, split="train", metrics={"loss": 1.0})
    killed.close()
    with open(run.metrics, "a") as file:
        file.write('{"step": 4')
    resumed = MetricsLog(run, tensorboard=False)
    resumed.discard_after(20)
    resumed.log(step=30, epoch=1, split="train", metrics={"loss": 2.0})
    resumed.close()
    assert [(point["step"], point["loss"]) for point in _read(tmp_path / "metrics.jsonl")] == [
        (10, 1.0),
        (20, 1.0),
        (30, 2.0),
    ]


def test_a_metric_that_takes_a_key_of_the_contract_is_refused(tmp_path: pathlib.Path) -> None:
    log = MetricsLog(RunDirectory(str(tmp_path)), tensorboard=False)
    with pytest.raises(UserError, match="may not be called 'step'"):
        log.log(step=1, epoch=1, split="train", metrics={"step": 1.0})


@pytest.mark.slow
def test_memory_does_not_grow_with_the_points_that_are_logged(tmp_path: pathlib.Path) -> None:
    log = MetricsLog(RunDirectory(str(tmp_path)))

    def log_points(steps: range) -> None:
        for step in steps:
            metrics = {"loss": 1 / step, "accuracy": 1 - 1 / step}  # numbers that were never logged before
            log.log(step=step, epoch=step, split=("eval", "train")[step % 2], metrics=metrics, learning_rate=0.1 / step)

    log_points(range(1, 1001))
    before = _resident_bytes()
    log_points(range(1001, 2501))
    grown = _resident_bytes() - before
    log.close()
    assert grown < 1500 * 500, f"{grown / 1500:.0f} bytes for each point; a run of millions of points must not grow"


def _resident_bytes() -> int:
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
