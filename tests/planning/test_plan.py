"""`--mode=plan` as a user types it: its files are valid, its plan trains, and impossible limits are one message."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support import REPOSITORY, run_python

from tfdist.checkpoint.policy import FIRST_COST, CheckpointPolicy
from tfdist.planning.estimate import (
    OPTIMIZER,
    DeviceGroup,
    Limits,
    PlannedChoice,
    PlannedTraining,
    TracedStep,
    estimate_group,
    estimate_memory,
    plan_checkpoints,
)
from tfdist.planning.planning import choose_plans
from tfdist.planning.traced_step import Step
from tfdist.tpu_compiler.devices import read_devices

SCHEMA = REPOSITORY / "tfdist" / "planning" / "plan.schema.json"
DIGITS = ["--gin_file=configs/experiments/digits.gin", "--gin_param=train.epochs = 2"]
PRICES = "--prices=l4=0.7,a100_40=3.7,v5e=1.2"
KNOWN = read_devices()
STEP = Step(
    rows=1,
    recomputes=False,
    parameters={"dense": 10**9},
    parameter_bytes=4 * 10**9,
    slot_bytes=8 * 10**9,
    gradient_bytes=4 * 10**9,
    tensor_bytes=5 * 10**9,
    batch_bytes=10**6,
    num_operations=1000,
    process_bytes=0,
    flops=6e9,
    bytes_moved=1e9,
    reduced_bytes=4 * 10**9,
    num_examples=10**6,
)


def step_of(rows: int, *, recomputes: bool) -> Step:
    """A thousand million weights; an example's activations take 1 GB, or 0.1 GB where blocks are computed again."""
    own = int((1e8 if recomputes else 1e9) * rows)
    return dataclasses.replace(
        STEP,
        rows=rows,
        recomputes=recomputes,
        tensor_bytes=4 * 10**9 + own,
        batch_bytes=10**6 * rows,
        flops=6e9 * rows * (4 / 3 if recomputes else 1),
        bytes_moved=1e9 * rows,
    )


def training(batch: int = 64) -> PlannedTraining:
    return PlannedTraining(
        global_batch_size=batch,
        total_steps=1000,
        precisions=("float32", "bfloat16"),
        trace=lambda precision, recomputes: TracedStep(*(step_of(n, recomputes=recomputes) for n in (8, 64))),
        compile_step=lambda group, choice: None,
        policy=None,
    )


def test_what_does_not_fit_is_cut_computed_again_and_shared_in_this_order() -> None:
    expected = {
        "h200": (1, False, None),
        "a100_40": (4, False, None),
        "l4": (4, False, None),
        "t4": (1, True, "optimizer"),
    }
    found = {}
    for kind, count in [("h200", 1), ("a100_40", 1), ("l4", 8), ("t4", 4)]:
        some = list(estimate_group(training(), DeviceGroup(KNOWN[kind], count), None))
        found[kind] = some and (some[0].choice.num_microbatches, some[0].choice.recomputes, some[0].choice.sharding)
        for each in some:
            assert each.memory_bytes <= 0.9 * each.group.device.memory_bytes
            assert each.choice.rows <= each.largest_rows
    assert found == expected


def test_sharing_takes_the_optimizers_part_alone() -> None:
    group = DeviceGroup(KNOWN["l4"], 8)
    choices = (PlannedChoice("float32", False, sharding, num_microbatches=1, rows=1) for sharding in (None, OPTIMIZER))
    whole, shared = (estimate_memory(STEP, group, choice) for choice in choices)
    assert whole - shared == STEP.slot_bytes * 7 / 8


def test_the_cheapest_comes_first_and_limits_hold() -> None:
    found = [
        each
        for kind in ("a100_40", "h200")
        for count in (1, 8)
        for each in estimate_group(training(), DeviceGroup(KNOWN[kind], count), None)
    ]
    best = choose_plans(found, Limits())
    prices = [each.price for each in best]
    assert prices == sorted(prices) and len({str(each.group) for each in best}) == len(best)
    quick = choose_plans(found, Limits(deadline_hours=min(each.hours for each in found)))
    assert len(quick) == 1 and quick[0].hours == min(each.hours for each in found)


def test_checkpoints_come_at_youngs_interval_and_their_cost_and_steps_done_twice_count() -> None:
    interval, lost = plan_checkpoints(CheckpointPolicy(mean_seconds_between_failures=7200))
    assert interval == pytest.approx((2 * FIRST_COST * 7200) ** 0.5)  # Young
    assert lost == pytest.approx(FIRST_COST / interval + interval / 2 / 7200)
    assert plan_checkpoints(None) == (None, 0.0)


def plan(run_dir: Path, *flags: str) -> Any:
    return run_python(["-m", "tfdist.main", "--mode=plan", *DIGITS, f"--run_dir={run_dir}", *flags], cwd=REPOSITORY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "device", "strategy", "launch"),
    [
        (["--devices=l4:1,a100_40:8", PRICES, "--budget_usd=1", "--deadline=1"], "l4", "one_device", ["tfdist.main"]),
        pytest.param(
            ["--gin_file=configs/strategies/horovod.gin", "--devices=h200:2", "--prices=h200=3"],
            *("h200", "horovod", ["tfdist.launch", "--workers=2", "--launcher=horovod", "--"]),
            marks=pytest.mark.horovod,
        ),
    ],
)
def test_a_plan_is_valid_and_trains(
    tmp_path: Path, flags: list[str], device: str, strategy: str, launch: list[str]
) -> None:
    told = plan(tmp_path, *flags).check()
    found = json.loads((tmp_path / "plan.json").read_text())
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert found["resourceAllocation"]["device"] == device and found["strategy"] == strategy
    assert found["distributed_config"]["num_workers"] == (2 if strategy == "horovod" else 1)
    assert found["model"]["parameters"] == 53_002 and found["cost_estimate"]["total_steps"] == 46
    assert "MFU" in told.stdout
    files = [*DIGITS, f"--gin_file={tmp_path}/plan.gin", f"--run_dir={tmp_path}/run"]
    trained = run_python(["-m", *launch, *files, "--gin_param=train.fast_check = True"], cwd=REPOSITORY).check()
    assert f"train: {strategy}, " in trained.stdout


def test_strategies_follow_the_devices_and_an_experiment_with_horovod_keeps_it() -> None:
    groups = [*(DeviceGroup(KNOWN["h200"], count) for count in (1, 8, 16)), DeviceGroup(KNOWN["v5p"], 8)]
    for horovod, expected in [
        (False, [("one_device", 1), ("mirrored", 1), ("multi_worker", 2), ("tpu", 1)]),
        (True, [("one_device", 1), ("horovod", 8), ("horovod", 16), ("tpu", 1)]),
    ]:
        of_kind = dataclasses.replace(training(), horovod=horovod)
        found = [next(estimate_group(of_kind, group, None)) for group in groups]
        assert [(each.strategy, each.num_workers) for each in found] == expected


@pytest.mark.slow
def test_an_impossible_budget_is_one_message_with_the_nearest_there_is(tmp_path: Path) -> None:
    refused = plan(tmp_path, "--devices=l4:1", PRICES, "--budget_usd=1e-12")
    assert refused.status == 2
    assert re.search(
        r"No plan meets --budget_usd=1e-12\. The cheapest is l4:1 with \S+ hours and \S+ USD", refused.stderr
    )
    assert "Traceback" not in refused.stderr and not (tmp_path / "plan.json").exists()


@pytest.mark.slow
def test_measurements_of_a_run_take_the_place_of_estimates(tmp_path: Path) -> None:
    run_python(["-m", "tfdist.main", *DIGITS, f"--run_dir={tmp_path}/run"], cwd=REPOSITORY).check()
    (tmp_path / "here.toml").write_text(
        "[here]\nmemory_gib = 8\nflops = {float32 = 1e11}\nmemory_bytes_per_second = 1e10\n"
        'link_bytes_per_second = 1e9\nper_machine = 1\nnames = ["CPU"]\n'
    )
    plan(tmp_path, f"--hardware={tmp_path}/here.toml", f"--from_run={tmp_path}/run").check()
    found = json.loads((tmp_path / "plan.json").read_text())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["performance_targets"]["examples_per_second"] == pytest.approx(result["examples_per_second"])
    assert found["basis"]["step_seconds"].startswith("measured in")


REDUCED = """
import sys

from tfdist.strategies.strategy import Strategy

sent = []
own = Strategy.sum_gradients


def counted(self, gradients, scalars):
    sent.append(sum(t.shape.num_elements() * t.dtype.size for t in [*gradients, *scalars]))
    return own(self, gradients, scalars)


Strategy.sum_gradients = counted
from tfdist import main

options = ["--gin_param=train.fast_check = True", "--gin_param=train.eval_data = None"]
strategy = ["--gin_file=configs/strategies/mirrored.gin", "--gin_param=mirrored.Mirrored.num_cpu_devices = 2"]
main.main([*sys.argv[1:], *strategy, *options])
print("sent", *set(sent))
"""


@pytest.mark.slow
def test_the_bytes_to_be_reduced_are_those_that_a_run_gives_to_its_reduction(tmp_path: Path) -> None:
    plan(tmp_path, "--devices=l4:2").check()
    found = json.loads((tmp_path / "plan.json").read_text())["model"]["bytes_reduced"]
    ran = run_python(["-c", REDUCED, *DIGITS, f"--run_dir={tmp_path}/run"], cwd=REPOSITORY).check()
    assert f"sent {found}" in ran.stdout.splitlines()
