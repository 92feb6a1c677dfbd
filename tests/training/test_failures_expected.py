"""What a run expects of failures: what its policy says, or what its own starts show, if that is worse."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import signal
import types
from collections.abc import Sequence
from typing import Any

import pytest
from training.test_resume import BASE, Once, fail, send
from training.trainings import run

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.strategies.one_device import OneDevice
from tfdist.telemetry.result import Start
from tfdist.training.recovery.survival import as_it_fails

POLICY = CheckpointPolicy(mean_seconds_between_failures=600.0)


def run_started(*seconds_ago: float, ends: Sequence[str | None] | None = None) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    ends = [None] * len(seconds_ago) if ends is None else ends
    starts = [Start(now - datetime.timedelta(seconds=s), 0, end=end) for s, end in zip(seconds_ago, ends, strict=True)]
    strategy = OneDevice()
    topology = strategy.connect()
    return types.SimpleNamespace(earlier_starts=starts, strategy=strategy, topology=topology)


@pytest.mark.parametrize(
    ("seconds_ago", "expected"),
    [((), 600.0), ((90.0, 60.0, 30.0), 30.0), ((86_400.0, 10.0), 600.0), ((0.0, 0.0, 0.0), 1.0)],
    ids=["first start", "often", "seldom", "at once"],
)
def test_frequent_failures_count(seconds_ago: tuple[float, ...], expected: float) -> None:
    policy = as_it_fails(run_started(*seconds_ago), POLICY)
    assert policy.mean_seconds_between_failures == pytest.approx(expected, abs=1.0)
    assert dataclasses.replace(policy, mean_seconds_between_failures=600.0) == POLICY


def test_starts_that_ended_as_planned_are_not_failures() -> None:
    planned = run_started(40.0, 30.0, 20.0, 10.0, ends=["preempted", "paused", "done", "done"])
    assert as_it_fails(planned, POLICY).mean_seconds_between_failures == 600.0
    one_failed = run_started(40.0, 30.0, 20.0, ends=["preempted", None, "paused"])
    assert as_it_fails(one_failed, POLICY).mean_seconds_between_failures == pytest.approx(40.0, abs=1.0)


@pytest.mark.slow
def test_run_json_says_how_each_start_ended(tmp_path: pathlib.Path) -> None:
    def end_with(**changes: object) -> list[str | None]:
        run(tmp_path, may_fail=True, **BASE | {"checkpoint": CheckpointPolicy(every_steps=3)} | changes)
        return [start["end"] for start in json.loads((tmp_path / "run.json").read_text())["starts"]]

    end_with(callbacks=[Once("on_train_batch_end", 4, fail)])
    end_with(callbacks=[Once("on_train_batch_end", 5, send(signal.SIGTERM))])
    end_with(stop_after_epochs=2)
    assert end_with() == [None, "preempted", "paused", "done"]
    assert [start["end"] for start in json.loads((tmp_path / "result.json").read_text())["starts"]][-1] == "done"
