"""The Weights & Biases sink, offline: what it wrote, read by wandb's own reader."""

from __future__ import annotations

import json
import pathlib
import signal
import sys
import threading
from typing import Any

import pytest
from gcs.server import GcsServer
from support import REPOSITORY, run_python
from telemetry.trackers import RUN_ID, run_facts, tell, tell_in_another_process

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.sinks.wandb import Wandb


def _read(log: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary of a run's log, and the points of its history."""
    command = ["-m", "wandb", "leet", "inspect", "--json"]
    records = map(json.loads, run_python([*command, str(log)]).check().stdout.splitlines())
    summary = json.loads(run_python([*command, "--summary", str(log)]).check().stdout)
    return summary, [record["history"]["item"] for record in records if record["type"] == "history"]


@pytest.mark.slow
def test_two_processes_of_a_run_write_one_run_of_wandb(tmp_path: pathlib.Path) -> None:
    (tmp_path / "result.json").write_text('{"steps": 5}')
    tell_in_another_process("wandb", "Wandb(project='digits')", tmp_path, range(1, 4), "failed")
    tell_in_another_process("wandb", "Wandb(project='digits')", tmp_path, range(3, 6), "done", start=1)
    logs = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert [log.name for log in logs] == 2 * [f"run-{RUN_ID}.wandb"]
    (failed, first), (done, second) = map(_read, logs)
    assert (failed["state"], failed["project"], failed["name"]) == ("failed", "digits", tmp_path.name)
    assert failed["config"]["train.epochs"] == "2" and failed["config"]["tfdist"]["strategy"] == "one_device"
    assert (done["state"], done["summary"]["status"], done["summary"]["result"]) == ("finished", "done", {"steps": 5})
    losses = [[(p["step"], p["train/loss"]) for p in points if "train/loss" in p] for points in (first, second)]
    assert losses == [[(k, pytest.approx(1 / k)) for k in steps] for steps in ((1, 2, 3), (3, 4, 5))]
    told = first[0] | first[1] | first[-1]
    assert (told["eval/loss"], told["learning_rate"], told["system/host_memory_bytes"]) == (0.25, 0.1, 1e9)
    assert "train/per_class" not in told


@pytest.mark.slow
def test_a_run_in_a_bucket_keeps_its_log_there_and_the_process_stays_as_it_is(
    gcs: GcsServer, tmp_path: pathlib.Path
) -> None:
    def state() -> list[Any]:
        return [sys.stdout, sys.stderr, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]

    before, run = state(), run_facts("gs://bucket/run")
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
        "from telemetry.trackers import run_facts",
        "from tfdist.telemetry.sinks.wandb import Wandb",
        f"Wandb(mode='online').open(run_facts({str(tmp_path)!r}))",
    ]
    environment = {"HOME": str(tmp_path), "WANDB_API_KEY": None}
    ended = run_python(["-c", "\n".join(program)], env=environment, cwd=REPOSITORY / "tests")
    assert "there is no API key: set WANDB_API_KEY" in ended.stderr and not (tmp_path / "wandb").exists()


def test_arguments_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(UserError, match=r"Wandb\.mode must be 'offline' or 'online'; received 'disabled'"):
        Wandb(mode="disabled")
    with pytest.raises(UserError, match=r"Wandb\.project must be a text; received ''"):
        Wandb(project="")
