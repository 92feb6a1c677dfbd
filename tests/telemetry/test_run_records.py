"""The files of a run: events, metrics and their summaries, the result, and the names that are a contract."""

from __future__ import annotations

import ast
import datetime
import gc
import io
import json
import os
import pathlib
import platform
import re
from typing import Any

import numpy as np
import pytest
import telemetry_page
from gcs.server import GcsServer
from support import REPOSITORY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.console.console import Console, PlainConsole
from tfdist.telemetry.events import EventLog
from tfdist.telemetry.facts import Point
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.metrics_log import MetricsLog
from tfdist.telemetry.registry import EVENTS
from tfdist.telemetry.result import RunResult, Start, versions, write_result
from tfdist.telemetry.run_directory import RunDirectory


def _open_metrics(run: RunDirectory, **options: Any) -> MetricsLog:
    return MetricsLog(run, events=EventLog(run, worker=0, console=Console()), **options)


def _point(step: int, split: str, metrics: dict[str, Any], rate: float | None = None, *, epoch: int = 1) -> Point:
    return Point(step=step, epoch=epoch, split=split, metrics=metrics, learning_rate=rate)


def _read(path: pathlib.Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_has_the_keys_of_the_contract_and_its_sentence_reaches_the_console(tmp_path: pathlib.Path) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    log = EventLog(RunDirectory(str(tmp_path)), worker=0, console=PlainConsole(stdout, stderr))
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


def test_every_value_becomes_one_line_of_json_that_a_strict_parser_takes() -> None:
    numbers = [float("nan"), float("inf"), -float("inf"), 0.1, np.float32(0.5), np.int64(3)]
    value = {"array": np.array([1.0, np.inf]), 3: (None, True), "text": "a\nb\u2028\udcff", "numbers": numbers}
    text = to_json(value)
    assert "\n" not in text and text.isascii()
    parsed = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert np.array_equal([float(number) for number in parsed.pop("numbers")], numbers, equal_nan=True)
    assert parsed == {"array": [1.0, "inf"], "3": [None, True], "text": "a\nb\u2028\udcff"}


def test_a_bucket_gets_the_same_metrics_and_summaries(gcs: GcsServer, tmp_path: pathlib.Path) -> None:
    log = _open_metrics(RunDirectory("gs://bucket/run"), config_text="train.epochs = 2\n")
    log.log(_point(1, "train", {"loss": 0.5}))
    log.log(_point(1, "eval", {"loss": 0.25}))
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


def test_a_metric_that_takes_a_key_of_the_contract_is_refused(tmp_path: pathlib.Path) -> None:
    log = _open_metrics(RunDirectory(str(tmp_path)), tensorboard=False)
    with pytest.raises(UserError, match="may not be called 'step'"):
        log.log(_point(1, "train", {"step": 1.0}))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_points_that_are_logged(tmp_path: pathlib.Path) -> None:
    log = _open_metrics(RunDirectory(str(tmp_path)))

    def log_points(steps: range) -> None:
        for step in steps:
            metrics = {"loss": 1 / step, "accuracy": 1 - 1 / step}  # numbers that were never logged before
            log.log(_point(step, ("eval", "train")[step % 2], metrics, 0.1 / step, epoch=step))

    log_points(range(1, 1001))
    before = _resident_bytes()
    log_points(range(1001, 2501))
    grown = _resident_bytes() - before
    log.close()
    assert grown < 1500 * 500, f"{grown / 1500:.0f} bytes for each point; a run of millions of points must not grow"


def _resident_bytes() -> int:
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_KEYS = """status mode end_reason stopped_by strategy num_workers num_replicas global_batch_size steps epochs
steps_per_epoch
examples_seen train_metrics eval_metrics best resumed_from_step starts goodput seconds checkpoint_step wall_seconds
examples_per_second hardware performance_targets notes versions"""
_RESULT = RunResult(
    steps=230,
    epochs=10,
    train_metrics={"loss": float("nan")},
    eval_metrics={"accuracy": 0.97},
    starts=[Start(datetime.datetime(2026, 11, 21, 14, 47, 13, tzinfo=datetime.UTC), 0)],
    versions=versions(),
)


def test_the_file_holds_the_keys_of_the_contract(tmp_path: pathlib.Path) -> None:
    write_result(RunDirectory(str(tmp_path)), _RESULT)
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert list(result) == _KEYS.split()
    assert (result["status"], result["train_metrics"], result["eval_metrics"]) == (
        "done",
        {"loss": "nan"},
        {"accuracy": 0.97},
    )
    assert result["resumed_from_step"] is None
    assert result["starts"] == [{"time": "2026-11-21T14:47:13.000+00:00", "step": 0, "lost_steps": 0}]
    assert result["versions"]["python"] == platform.python_version()
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


# The registry


TELLS = {
    "info": "info",
    "warning": "warning",
    "error": "error",
    "_warn": "warning",
    "give": "warning",
    "note": "warning",
}
ELSEWHERE = {  # told by a name that is no literal argument
    "cuda_oom": "warning",
    "rolled_back": "warning",
    "restarts_used_up": "error",
    "breaker_opened": "error",
    "worker_failed": "warning",
    "worker_hung": "warning",
}


def told_in_source() -> dict[str, set[str]]:
    """The events that the source tells, with their levels."""
    found: dict[str, set[str]] = {name: {level} for name, level in ELSEWHERE.items()}
    for path in (REPOSITORY / "tfdist").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            texts = [each.value for each in call.args[:2] if isinstance(each, ast.Constant)]
            names = [text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z]+(_[a-z]+)*", text)]
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if function == "log" and len(names) == 2 and names[0] in ("info", "warning", "error"):
                found.setdefault(names[1], set()).add(names[0])  # a supervisor's
            elif function in ("tell", "_tell") and names[:1] == ["xla_chosen"]:
                found.setdefault(names[0], set()).add("info")
            elif function in TELLS and names and texts[0] == names[0] and names[0] not in TELLS:
                found.setdefault(names[0], set()).add(TELLS[function])
            elif function == "News" and names:
                warns = any(keyword.arg == "is_warning" for keyword in call.keywords)
                found.setdefault(names[0], set()).add("warning" if warns else "info")
    return found


def test_every_event_that_the_source_tells_is_registered_with_its_level_and_no_other_is() -> None:
    assert told_in_source() == {name: {level} for name, (level, _) in EVENTS.items()}


def test_the_page_has_the_tables_of_the_registry() -> None:
    assert telemetry_page.render_page() == telemetry_page.PAGE.read_text(), "run: python tools/telemetry_page.py"
