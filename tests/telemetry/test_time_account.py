"""Every second of a worker is in its account once; sinks hear of it, and only steps that counted count."""

from __future__ import annotations

import collections
import datetime
import os
import pathlib
import random
import time
import types

import pytest
from checkpoint.checkpoints import Listener

from tfdist.telemetry import heartbeat
from tfdist.telemetry.account import time_account
from tfdist.telemetry.account.goodput import DOWN, REDONE, compute_accounts, goodput
from tfdist.telemetry.account.sampler import Sampler, sample_line
from tfdist.telemetry.account.time_account import TimeAccount
from tfdist.telemetry.facts import Sample
from tfdist.telemetry.records import Unreadable, read_samples
from tfdist.telemetry.result import Start
from tfdist.telemetry.run_directory import RunDirectory


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


# Goodput


BEGAN = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)


def sample(at: float, step: int | None, *, start: int = 0, process: str = "", **seconds: float) -> Sample:
    time = BEGAN + datetime.timedelta(seconds=at)
    return Sample(worker=0, start=start, step=step, seconds=seconds, values={}, process=process, time=time)


def starts(*steps: int) -> list[Start]:
    return [Start(BEGAN, step) for step in steps]


def test_steps_done_again_and_the_time_between_starts_are_lost() -> None:
    told = [
        sample(10, 100, compute=10),
        sample(20, 300, compute=20),  # of whose 200 steps the next start keeps 50
        sample(40, 250, start=1, build=5, compute=5),
    ]
    (account,) = compute_accounts(told, starts(0, 150)).values()
    assert account.seconds == pytest.approx({"build": 5, "compute": 10 + 2.5 + 5, REDONE: 7.5, DOWN: 10})
    assert account.wall_seconds == pytest.approx(40)
    assert goodput(told, starts(0, 150)) == pytest.approx(17.5 / 40)


def test_what_a_later_start_goes_back_behind_is_lost_of_all_starts_before() -> None:
    told = [sample(10, 100, compute=10), sample(20, 200, start=1, compute=10), sample(30, 150, start=2, compute=10)]
    (account,) = compute_accounts(told, starts(0, 100, 50)).values()
    assert account.seconds == pytest.approx({"compute": 15, REDONE: 15})


@pytest.mark.parametrize("shift", [3600, 0, -3600])
def test_a_step_of_the_clock_neither_splits_a_process_nor_counts(tmp_path: pathlib.Path, shift: int) -> None:
    told = [sample(age + shift * (age > 40), age, process="a", imports=10, compute=age - 10) for age in (20, 40, 70)]
    told.append(sample(shift + 85, 70, process="b", compute=5))  # of the same start, since "a" failed early
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry" / "worker-0.jsonl").write_text("".join(f"{sample_line(each)}\n" for each in told))
    read = read_samples(RunDirectory(str(tmp_path)), Unreadable())
    assert read == told
    assert compute_accounts(read, starts(0))[0].seconds == {"imports": 10, "compute": 65, DOWN: 10}


@pytest.mark.parametrize("seed", range(20))
def test_the_account_adds_up_to_the_wall_clock_at_each_sample(seed: int) -> None:
    dice = random.Random(seed)
    told, resumed, now, step = [], [0], 0.0, 0
    for start in range(4):
        spent = {"build": 0.0, "compute": 0.0, "evaluate": 0.0}
        for _ in range(dice.randint(1, 5)):
            more = {share: dice.random() * 10 for share in spent}
            spent = {share: spent[share] + more[share] for share in spent}
            now += sum(more.values())
            step += dice.randint(0, 50)
            told.append(sample(now, step, start=start, **spent))
        now += dice.random() * 30
        step = dice.randint(0, step)
        resumed.append(step)
    for number, last in enumerate(told, 1):
        (account,) = compute_accounts(told[:number], starts(*resumed[: last.start + 1])).values()
        assert account.wall_seconds == pytest.approx((last.time - BEGAN).total_seconds(), abs=1e-3)
        assert min(account.seconds.values()) > 0
