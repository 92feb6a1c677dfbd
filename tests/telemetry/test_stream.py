"""Sinks get every fact in order on a thread of their own, and one that fails or hangs is dropped with one warning."""

from __future__ import annotations

import json
import pathlib
import threading
import time
from typing import Any

import pytest
import support
from monitoring_support import run_facts
from training.trainings import run

from tfdist.telemetry.facts import Event, Point, RunFacts, Sample
from tfdist.telemetry.sinks import sink as sinks
from tfdist.telemetry.sinks.sink import Sink, SinkDispatcher

RUN = run_facts()


class Keeps(Sink):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.threads: set[str] = set()

    def open(self, run: RunFacts) -> None:
        self.told.append(run.run_id)

    def event(self, event: Event) -> None:
        self.threads.add(threading.current_thread().name)
        self.told.append(event.name)

    def point(self, point: Point) -> None:
        self.told.append(point.step)

    def sample(self, sample: Sample) -> None:
        self.told.append(sample.values["host_memory_bytes"])

    def close(self, status: str) -> None:
        self.told.append(status)


class Fails(Sink):
    def __init__(self, on: str, error: BaseException) -> None:
        self._on, self._error = on, error

    def event(self, event: Event) -> None:
        if event.name == self._on:
            raise self._error


class Hangs(Sink):
    def __init__(self) -> None:
        self.released = threading.Event()

    def event(self, event: Event) -> None:
        self.released.wait(60)


def event(name: str) -> Event:
    return Event(name=name, level="info", worker=0)


def test_a_sink_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "HANG_SECONDS", 0.2)
    hangs, warnings = Hangs(), []
    told = SinkDispatcher([hangs], RUN, warn=warnings.append)
    slowest = 0.0

    def tells() -> bool:
        nonlocal slowest
        begun = time.perf_counter()
        told.dispatch(event("workers"))
        slowest = max(slowest, time.perf_counter() - begun)
        return bool(warnings)

    support.wait_until(tells, seconds=10)
    told.close()
    hangs.released.set()
    assert len(warnings) == 1 and "has not returned for" in warnings[0]
    assert slowest < 0.2  # the call itself would take a minute


@pytest.mark.parametrize(
    ("limit", "count", "warning"),
    [(("CLOSE_SECONDS", 0.5), 1, "was not done"), (("MAX_WAITING", 5), 10, "5 facts wait for it")],
)
def test_a_sink_that_is_behind_at_the_end_or_by_too_much_is_dropped(
    monkeypatch: pytest.MonkeyPatch, limit: tuple[str, float], count: int, warning: str
) -> None:
    monkeypatch.setattr(sinks, *limit)
    hangs, warnings = Hangs(), []
    told = SinkDispatcher([hangs], RUN, warn=warnings.append)
    for _ in range(count):
        told.dispatch(event("workers"))
    told.close()
    hangs.released.set()
    assert len(warnings) == 1 and warning in warnings[0]


@pytest.mark.slow
def test_a_training_tells_its_sinks_and_survives_one_that_fails(tmp_path: pathlib.Path) -> None:
    keeps = Keeps()
    fails = [Fails("data_opened", error("no route")) for error in (RuntimeError, SystemExit)]
    trained = run(tmp_path, sinks=[*fails, keeps])
    assert trained.result is not None
    dropped = sorted(each["details"]["message"] for each in trained.events("sink_dropped"))
    start = "The sink Fails was dropped, and the run goes on without it: "
    assert dropped == [f"{start}RuntimeError: no route.", f"{start}SystemExit: no route."]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    written = [name for name in (json.loads(line)["event"] for line in lines) if name != "sink_dropped"]
    assert [each for each in keeps.told[1:-1] if isinstance(each, str) and each != "sink_dropped"] == written
    assert keeps.told[0] == (tmp_path / "telemetry" / "run_id").read_text().strip()
    assert keeps.told[-1] == "done"
    steps = [each for each in keeps.told if isinstance(each, int)]
    assert steps == [p["step"] for p in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
