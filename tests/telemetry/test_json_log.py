"""--log=json: every line is an object with the same keys, and all starts and workers of a run bear one id."""

from __future__ import annotations

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import support

from tfdist.telemetry.console import json_log
from tfdist.telemetry.console.json_log import JsonLog
from tfdist.telemetry.facts import Event

DIGITS = support.REPOSITORY / "configs" / "experiments" / "digits.gin"
KEYS = {"time", "level", "job_id", "worker", "event", "epoch", "step", "loss", "gpu_memory_used", "message"}


def test_levels_and_names_are_those_that_operators_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(json_log, "device_memory_bytes", lambda: 7)
    log = JsonLog(is_chief=True)
    log.event(Event(name="checkpoint_saved", level="info", step=3))
    log.event(Event(name="gradient_overflow", level="warning", step=4))
    log.event(Event(name="straggler", level="warning", message="worker 1 holds up the others"))
    log.event(Event(name="run_failed", level="error"))
    log.message("A sentence.", "error")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line.keys() >= KEYS and line["gpu_memory_used"] == 7 for line in lines)
    told = [(line["level"], line["event"], line["step"]) for line in lines]
    assert told == [
        ("INFO", "checkpoint_saved", 3),
        ("WARN", "gradient_overflow", 4),
        ("WARN", "straggler", None),
        ("FATAL", "run_failed", None),
        ("ERROR", None, None),
    ]


def test_a_line_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one of another thread could come before its end."""
    written: list[str] = []
    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    JsonLog(is_chief=True).message("A sentence.")
    assert [text for text in written if text] and all(text.endswith("\n") for text in written if text)


def lines_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line.partition("] ")[2] if line.startswith("[worker") else line) for line in output.splitlines()]


@pytest.mark.slow
def test_two_workers_and_two_starts_of_a_run_have_one_id(tmp_path: pathlib.Path) -> None:
    shared = [f"--gin_file={DIGITS}", f"--run_dir={tmp_path}", "--log=json"]
    launch = ["-m", "tfdist.launch", "--workers=2", "--", *shared, "--gin_param=train.stop_after_epochs = 1"]
    first = support.run_python(launch, timeout=240).check()
    second = support.run_python(["-m", "tfdist.main", *shared], timeout=240).check()
    lines = lines_of("\n".join(line for line in first.stdout.splitlines() if line.startswith("[worker")))
    workers = {line["worker"] for line in lines if line["job_id"] is not None}
    assert workers == {0, 1}
    ids = {line["job_id"] for line in lines + lines_of(second.stdout)} - {None}
    assert ids == {(tmp_path / "telemetry" / "run_id").read_text().strip()}
    ended = [line for line in lines_of(second.stdout) if line["event"] == "epoch_ended"]
    assert [line["epoch"] for line in ended] == list(range(2, 13)) and all(line["loss"] > 0 for line in ended)
    starts = [
        json.loads(line)["start"] for line in (tmp_path / "telemetry" / "worker-0.jsonl").read_text().splitlines()
    ]
    assert sorted(set(starts)) == [0, 1]
    assert (tmp_path / "telemetry" / "worker-1.jsonl").exists()
