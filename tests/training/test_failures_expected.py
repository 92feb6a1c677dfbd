"""What a run expects of failures: what its policy says, or what its own starts show, if that is worse."""

from __future__ import annotations

import dataclasses
import datetime
import types
from typing import Any

import pytest

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.strategies.one_device import OneDevice
from tfdist.telemetry.result import Start
from tfdist.training.recovery.survival import as_it_fails

POLICY = CheckpointPolicy(mean_seconds_between_failures=600.0)


def run_started(*seconds_ago: float) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    starts = [Start(now - datetime.timedelta(seconds=s), 0) for s in seconds_ago]
    strategy = OneDevice()
    topology = strategy.connect()
    return types.SimpleNamespace(earlier_starts=starts, strategy=strategy, topology=topology)


@pytest.mark.parametrize(
    ("seconds_ago", "expected"),
    [((), 600.0), ((90.0, 60.0, 30.0), 30.0), ((86_400.0, 10.0), 600.0), ((0.0, 0.0, 0.0), 1.0)],
    ids=["first start", "often", "seldom", "at once"],
)
def test_frequent_starts_count(seconds_ago: tuple[float, ...], expected: float) -> None:
    policy = as_it_fails(run_started(*seconds_ago), POLICY)
    assert policy.mean_seconds_between_failures == pytest.approx(expected, abs=1.0)
    assert dataclasses.replace(policy, mean_seconds_between_failures=600.0) == POLICY
