"""Goodput: every second of a worker is in its account once, and only steps that counted count."""

from __future__ import annotations

import datetime
import pathlib
import random

import pytest

from tfdist.telemetry.account.goodput import DOWN, REDONE, compute_accounts, goodput
from tfdist.telemetry.account.sampler import sample_line
from tfdist.telemetry.facts import Sample
from tfdist.telemetry.records import Unreadable, read_samples
from tfdist.telemetry.result import Start
from tfdist.telemetry.run_directory import RunDirectory

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
