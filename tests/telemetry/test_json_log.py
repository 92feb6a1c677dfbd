"""--log=json: every line is an object with the same keys, under the names that operators know."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tfdist.telemetry.console import json_log
from tfdist.telemetry.console.json_log import JsonLog
from tfdist.telemetry.facts import Event

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
