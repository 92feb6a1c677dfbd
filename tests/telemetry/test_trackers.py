"""MLflow against a real server of its own, W&B offline and read by its own reader, and a real training told to both."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from gcs.server import GcsServer
from mistakes import each_is_refused
from mlflow import MlflowClient
from monitoring_support import tracked_facts
from processes import serving
from support import REPOSITORY, free_ports, run_python
from tuning.sweeps import arguments, write_experiment

from tfdist.storage import files
from tfdist.telemetry.facts import Point, RunFacts, Sample
from tfdist.telemetry.sinks.mlflow import MLflow
from tfdist.telemetry.sinks.sink import Sink, check_client
from tfdist.telemetry.sinks.wandb import Wandb

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
BREAKS = """\
import pathlib
import keras
from tfdist.telemetry.sinks import sink

sink.HANG_SECONDS = sink.CLOSE_SECONDS = 300.0  # the trackers' own processes share a busy machine

class Breaks(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2 and not pathlib.Path(__file__).with_name("mended").exists():
            raise RuntimeError("broken on purpose")
"""
SINKS = """\
import breaks
from tfdist.telemetry.sinks import mlflow
from tfdist.telemetry.sinks import wandb

train.sinks = [@mlflow.MLflow(), @wandb.Wandb()]
train.callbacks = [@breaks.Breaks()]
"""


def point(step: int, loss: float, split: str = "train") -> Point:
    metrics = {"loss": loss, "gradient_norm/kernel$": 2.0, "per_class": [1.0, 2.0]}
    return Point(step=step, epoch=1, split=split, metrics=metrics, learning_rate=0.1)


def tell(sink: Sink, run: RunFacts, steps: range, status: str) -> None:
    """Tells a sink of a run from its beginning to its end."""
    sink.open(run)
    for step in steps:
        sink.point(point(step, 1 / step))
        values = {"host_memory_bytes": 1e9}
        sink.sample(Sample(worker=0, start=run.start, step=step, seconds={"computing": 2.0}, values=values))
    sink.point(point(steps[-1], 0.25, "eval"))
    sink.close(status)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that keeps its runs in SQLite."""
    directory = tmp_path_factory.mktemp("mlflow")
    (port,) = free_ports(1)
    stores = [f"--backend-store-uri=sqlite:///{directory}/runs.db", f"--artifacts-destination={directory}/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", *stores, f"--port={port}", "--workers=1"]
    address = f"http://127.0.0.1:{port}"
    with serving(command, directory / "log", lambda: _answers(address), variables=QUIET):
        yield address


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
        return bool(answer.read() == b"OK")
    return False


def _read(log: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary of a run's log, and the points of its history."""
    command = ["-m", "wandb", "leet", "inspect", "--json"]
    records = map(json.loads, run_python([*command, str(log)]).check().stdout.splitlines())
    summary = json.loads(run_python([*command, "--summary", str(log)]).check().stdout)
    return summary, [record["history"]["item"] for record in records if record["type"] == "history"]


@pytest.mark.slow
def test_a_run_in_a_bucket_has_its_artifacts_and_one_that_was_preempted_is_killed(
    server: str, gcs: GcsServer, tmp_path: pathlib.Path
) -> None:
    files.write_atomic("gs://bucket/run/config.gin", "train.epochs = 2\n")
    for changed in ({}, {"start": 1, "settings": {"train.epochs": "5"}}):
        sink = MLflow(tracking_uri=server, experiment="bucket", run_name="named")
        tell(sink, tracked_facts("gs://bucket/run", **changed), range(1, 2), "preempted")
    client = MlflowClient(server)
    (run,) = client.search_runs([client.get_experiment_by_name("bucket").experiment_id])
    assert (run.info.status, run.info.run_name, run.data.tags["tfdist.status"]) == ("KILLED", "named", "preempted")
    assert run.data.params["train.epochs"] == "2"  # MLflow never changes a parameter
    assert run.data.params["LONG"] == 6000 * "x" and "tfdist.versions.keras" in run.data.tags
    assert run.data.metrics["train/gradient_norm/kernel_"] == 2.0  # "$" is no character of a name there
    assert run.data.metrics["system/host_memory_bytes"] == 1e9 and "train/per_class" not in run.data.metrics
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["config.gin"]
    path = client.download_artifacts(run.info.run_id, "config.gin", str(tmp_path))
    assert pathlib.Path(path).read_text() == "train.epochs = 2\n"


@pytest.mark.slow
def test_a_training_that_fails_and_is_resumed_is_one_run_of_mlflow_and_of_wandb(
    server: str, tmp_path: pathlib.Path
) -> None:
    run = tmp_path / "run"
    gin_file = write_experiment(tmp_path)
    (tmp_path / "breaks.py").write_text(BREAKS)
    gin_file.write_text(gin_file.read_text() + SINKS)
    command = arguments(gin_file, run, f"mlflow.MLflow.tracking_uri = {server!r}", mode="train")
    failed = run_python(["-m", "tfdist.main", *command], env=QUIET, cwd=tmp_path)
    assert failed.status == 2 and "broken on purpose" in failed.stderr, failed.outputs()
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("tfdist").experiment_id
    (first,) = client.search_runs([experiment])
    assert first.info.status == "FAILED" and "broken on purpose" in first.data.tags["tfdist.error"]

    (tmp_path / "mended").touch()
    run_python(["-m", "tfdist.main", *command], env=QUIET, cwd=tmp_path).check()
    (both,) = client.search_runs([experiment])
    assert (both.info.run_id, both.info.status, both.info.run_name) == (first.info.run_id, "FINISHED", "run")
    assert both.data.params["train.epochs"] == "4" and both.data.tags["tfdist.start"] == "1"
    assert "tfdist.error" not in both.data.tags and both.data.tags["tfdist.status"] == "done"
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {point["step"]: point["loss"] for point in told if point["split"] == "eval"}
    history = client.get_metric_history(both.info.run_id, "eval/loss")
    assert {each.step: each.value for each in history} == losses and len(losses) == 4
    artifacts = {each.path for each in client.list_artifacts(both.info.run_id)}
    assert artifacts == {"config.gin", "result.json", "events.jsonl"}

    logs = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert [log.name for log in logs] == 2 * [f"run-{(run / 'telemetry' / 'run_id').read_text().strip()}.wandb"]
    (failed, before), (done, after) = map(_read, logs)
    assert (failed["state"], failed["project"], failed["name"]) == ("failed", "tfdist", "run")
    assert failed["config"]["train.epochs"] == "4" and failed["config"]["tfdist"]["strategy"] == "one_device"
    assert (done["state"], done["summary"]["status"]) == ("finished", "done")
    assert done["summary"]["result"] == json.loads((run / "result.json").read_text())
    evaluated = [{p["step"]: p["eval/loss"] for p in points if "eval/loss" in p} for points in (before, after)]
    assert evaluated[0] | evaluated[1] == losses and 0 < len(evaluated[0]) < 4
    assert {"train/loss", "learning_rate", "system/host_memory_bytes"} <= set().union(*before)


@pytest.mark.slow
def test_a_run_in_a_bucket_keeps_its_log_there_and_the_process_stays_as_it_is(
    gcs: GcsServer, tmp_path: pathlib.Path
) -> None:
    def state() -> list[Any]:
        return [sys.stdout, sys.stderr, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]

    before, run = state(), tracked_facts("gs://bucket/run")
    thread = threading.Thread(target=lambda: tell(Wandb(name="named"), run, range(1, 3), "preempted"))
    thread.start()
    thread.join()
    assert state() == before
    (name,) = [name for name in files.list_tree("gs://bucket/run") if name.endswith(".wandb")]
    (tmp_path / "copy.wandb").write_bytes(files.read(f"gs://bucket/run/{name}"))
    summary, points = _read(tmp_path / "copy.wandb")
    assert (summary["name"], summary["exit_code"], summary["summary"]["status"]) == ("named", 1, "preempted")
    assert [p["step"] for p in points if "train/loss" in p] == [1, 2]


@pytest.mark.slow
def test_without_a_key_nothing_is_asked_for_and_nothing_is_sent(tmp_path: pathlib.Path) -> None:
    program = [
        "from monitoring_support import tracked_facts",
        "from tfdist.telemetry.sinks.wandb import Wandb",
        f"Wandb(mode='online').open(tracked_facts({str(tmp_path)!r}))",
    ]
    environment = {"HOME": str(tmp_path), "WANDB_API_KEY": None}
    ended = run_python(["-c", "\n".join(program)], env=environment, cwd=REPOSITORY / "tests")
    assert "there is no API key: set WANDB_API_KEY" in ended.stderr and not (tmp_path / "wandb").exists()


test_arguments_that_cannot_be_meant_are_refused = each_is_refused(
    lambda tracker, wrong: tracker(**wrong),
    (MLflow, {"experiment": 3}, "MLflow.experiment must be a text; received 3"),
    (Wandb, {"mode": "disabled"}, "Wandb.mode must be 'offline' or 'online'; received 'disabled'"),
    (Wandb, {"project": ""}, "Wandb.project must be a text; received ''"),
)


def test_a_client_is_imported_by_the_thread_that_makes_the_sink(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_client.py").write_text("import threading\nTHREAD = threading.current_thread()\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_client("Sink", "a_client", "a-client", {})
    assert sys.modules["a_client"].THREAD is threading.current_thread()
