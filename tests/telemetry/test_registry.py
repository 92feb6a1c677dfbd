"""What a run tells stands in the registry, and the page of it is current."""

from __future__ import annotations

import ast
import dataclasses
import re

import telemetry_page
from support import REPOSITORY
from telemetry.test_stream import RUN as ALONE

from tfdist.telemetry.account.time_account import SHARES
from tfdist.telemetry.facts import Event, Point, Sample
from tfdist.telemetry.registry import COUNTER, EVENTS, GAUGE, HISTOGRAM, METRICS
from tfdist.telemetry.sinks.measures import Measures

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
RUN = dataclasses.replace(ALONE, strategy="mirrored", num_replicas=4, price_per_device_hour=3.6)


def told_in_source() -> dict[str, set[str]]:
    """The events that the source tells, with their levels."""
    found: dict[str, set[str]] = {name: {level} for name, level in ELSEWHERE.items()}
    for path in (REPOSITORY / "tfdist").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            texts = [each.value for each in call.args[:2] if isinstance(each, ast.Constant)]
            names = [text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z]+(_[a-z]+)*", text)]
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if function == "note" and len(names) == 2 and names[0] in ("info", "warning", "error"):
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
    assert told_in_source() == {name: {event.level} for name, event in EVENTS.items()}


def test_operators_find_the_names_that_they_alert_on() -> None:
    names = EVENTS.keys()
    assert names >= {
        "training_started",
        "checkpoint_saved",
        "gpu_util_low",
        "gradient_overflow",
        "cuda_oom",
        "nccl_timeout",
        "training_diverged",
    }
    kinds = {name: metric.kind for name, metric in METRICS.items()}
    assert kinds["training_duration_seconds"] == kinds["checkpoint_size_mb"] == HISTOGRAM
    assert kinds["gpu_utilization"] == kinds["training_loss"] == kinds["learning_rate"] == GAUGE
    assert kinds["cost_usd"] == COUNTER
    assert METRICS["training_duration_seconds"].buckets == (600, 3600, 14400, 86400)


def test_facts_become_the_registered_metrics() -> None:
    measures = Measures(RUN)

    def of(fact: Event | Point | Sample) -> dict[str, float]:
        return {"|".join([m.metric.name, *m.labels.values()]): m.value for m in measures.of(fact)}

    point = Point(step=10, epoch=1, split="train", metrics={"loss": 0.5, "accuracy": 0.75}, learning_rate=0.01)
    assert of(point) == {
        "metric_value|train|loss": 0.5,
        "metric_value|train|accuracy": 0.75,
        "training_loss": 0.5,
        "loss_is_finite": 1.0,
        "learning_rate": 0.01,
    }
    assert of(Point(step=10, epoch=1, split="train", metrics={"loss": float("nan")}))["loss_is_finite"] == 0.0
    seconds = dict.fromkeys(SHARES, 0.0)
    first = Sample(worker=0, start=0, step=10, seconds=seconds | {"compute": 100.0}, values={"host_memory_bytes": 5.0})
    second = Sample(worker=0, start=0, step=10, seconds=seconds | {"compute": 130.0, "finish": 20.0}, values={})
    assert of(first)["cost_usd"] == 100.0 * 4 * 3.6 / 3600
    later = of(second)
    assert later["time_seconds_total|compute"] == 30.0 and later["time_seconds_total|finish"] == 20.0
    assert later["cost_usd"] == 50.0 * 4 * 3.6 / 3600
    assert later["compute_share"] == 130 / 150 and "last_step_timestamp_seconds" not in later
    stored = Event(name="checkpoint_saved", level="info", details={"num_bytes": 2e6, "write_seconds": 0.5})
    assert of(stored) | {"last_checkpoint_timestamp_seconds": 0} == {
        "events_total|checkpoint_saved|info": 1.0,
        "checkpoint_size_mb": 2.0,
        "checkpoint_write_seconds": 0.5,
        "last_checkpoint_timestamp_seconds": 0,
    }
    assert "checkpoint_interval_seconds" in of(stored)
    assert of(Event(name="run_finished", level="info"))["training_duration_seconds"] == 150.0


def test_the_page_has_the_tables_of_the_registry() -> None:
    assert telemetry_page.written() == telemetry_page.PAGE.read_text(), "run: python tools/telemetry_page.py"
