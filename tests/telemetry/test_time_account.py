"""The shares of a process's time add up to its wall clock, sinks hear of them, and a supervisor reads what is whole."""

from __future__ import annotations

import collections
import os
import pathlib
import time
import types

import pytest
from checkpoint.checkpoints import Listener

from tfdist.telemetry import heartbeat
from tfdist.telemetry.account import time_account
from tfdist.telemetry.account.sampler import Sampler
from tfdist.telemetry.account.time_account import TimeAccount


def test_a_fork_begins_its_own() -> None:
    time_account.begin(time.monotonic() - 100.0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(sum(time_account.current().seconds().values())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert float(os.read(read, 100)) < 50.0
    os.close(read)
    os.close(write)
    time_account.begin()


def test_phases_are_told_in_order_with_their_seconds_and_their_ends() -> None:
    told: list[tuple[str, float, float]] = []
    account = TimeAccount(time.monotonic() - 10)  # importing, since then
    account.enter("connect")
    account.enter("data")
    account.listen(lambda *phase: told.append(phase))
    assert [share for share, _, _ in told] == ["import", "connect"]
    assert [seconds for _, seconds, _ in told] == [account.seconds()["import"], account.seconds()["connect"]]
    assert told[0][1] >= 10
    assert told[0][2] >= told[1][1] + told[1][2]  # connecting came after it
    told.clear()
    for share in ("data", "build", "compute", "callbacks", "compute", "evaluate", "callbacks"):
        account.enter(share)
    account.move(1e-9, "compute", "build")
    assert [(share, ago) for share, _, ago in told] == [("data", 0), ("build", 0), ("evaluate", 0), ("build", 0)]
    assert told[-1][1] == 1e-9


@pytest.mark.parametrize("content", [b"", b"x", b"[" * 100_000, b"[]", b"5", b"\xff" * 400, bytes(400)])
def test_they_are_taken_for_nothing(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "0.heartbeat"
    path.write_bytes(content)
    path.with_name("0.heartbeat.facts").write_bytes(content)
    assert heartbeat.read(path) is None and heartbeat.read_exit_info(path) == {}


def test_gpus_that_compute_less_than_80_percent_of_a_window_are_told_once() -> None:
    for low, expected in ((0.79, 1), (0.81, 0)):
        watcher, told = Sampler.__new__(Sampler), Listener()
        watcher._run, watcher._events = types.SimpleNamespace(worker=0), told
        watcher._utilization, watcher._has_warned = collections.deque(maxlen=30), False
        for _ in range(40):
            watcher._watch({"gpu_utilization": low})
            watcher._watch({})
        assert len(told.warnings) == expected
    assert not told.told
