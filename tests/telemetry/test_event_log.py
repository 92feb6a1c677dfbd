"""events.jsonl: one JSON object a lifecycle event."""

from __future__ import annotations

import datetime
import io
import json
import pathlib

import numpy as np
import pytest

from tfdist.telemetry.console.console import NullConsole, PlainConsole
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.logs.events import EventLog
from tfdist.telemetry.run_directory import RunDirectory


def _read(path: pathlib.Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_has_the_keys_of_the_contract_and_its_sentence_reaches_the_console(tmp_path: pathlib.Path) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    log = EventLog(RunDirectory(str(tmp_path)), worker=0, is_chief=True, console=PlainConsole(stdout, stderr))
    log.info("training_started", step=np.int64(0), message="Starting.", replicas=2, loss=np.float32("nan"))
    log.warning("checkpoint_passed_over", step=7, message="It is torn.", path=tmp_path)
    log.info("quiet_one")
    log.close()
    first, second, third = _read(tmp_path / "events.jsonl")
    assert list(first) == ["time", "level", "event", "worker", "step", "details"]
    time = datetime.datetime.fromisoformat(str(first["time"]))
    assert time.utcoffset() == datetime.timedelta(0)
    assert len(str(first["time"])) == len("2026-01-31T10:00:00.123Z")
    assert first["details"] == {"message": "Starting.", "replicas": 2, "loss": "nan"}
    assert (second["level"], second["step"], second["details"]["path"]) == ("warning", 7, str(tmp_path))
    assert (third["step"], third["details"]) == (None, {})
    assert stdout.getvalue() == "Starting.\n"
    assert stderr.getvalue() == "warning: It is torn.\n"


def test_a_second_run_in_the_directory_goes_on_behind_the_first(tmp_path: pathlib.Path) -> None:
    for event in ("training_started", "run_resumed"):
        log = EventLog(RunDirectory(str(tmp_path)), worker=0, is_chief=True, console=NullConsole())
        log.info(event)
        log.close()
    assert [record["event"] for record in _read(tmp_path / "events.jsonl")] == ["training_started", "run_resumed"]


def test_another_worker_writes_its_own_file_and_only_when_it_has_something_to_tell(tmp_path: pathlib.Path) -> None:
    stderr = io.StringIO()
    log = EventLog(RunDirectory(str(tmp_path)), worker=3, is_chief=False, console=NullConsole(stderr))
    log.close()
    assert list(tmp_path.iterdir()) == []
    log.warning("slow", message="The disk is slow.")
    log.error("nccl_timeout", message="Worker 0 is gone.")
    log.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["events-worker-3.jsonl"]
    assert [record["worker"] for record in _read(tmp_path / "events-worker-3.jsonl")] == [3, 3]
    assert stderr.getvalue() == "error: Worker 0 is gone.\n"


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 0.1, np.float32(0.5), np.int64(3)])
def test_every_number_becomes_json_that_a_strict_parser_takes_and_float_reads_back(number: float) -> None:
    parsed = json.loads(to_json({"value": number}), parse_constant=_refuse)["value"]
    assert np.array_equal(float(parsed), float(number), equal_nan=True)


@pytest.mark.slow
def test_arrays_mappings_and_strange_text_become_one_line_of_json() -> None:
    value = {"array": np.array([1.0, np.inf]), 3: (None, True), "text": "a\nb\u2028\udcff"}
    text = to_json(value)
    assert "\n" not in text
    assert text.isascii()
    assert json.loads(text) == {"array": [1.0, "inf"], "3": [None, True], "text": "a\nb\u2028\udcff"}
