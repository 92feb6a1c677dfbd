"""`--mode=plan` as a user types it: its files are valid, its plan trains, and impossible limits are one message."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from pathlib import Path
from typing import Any

import jsonschema
import keras
import numpy as np
import pytest
from mistakes import call, each_is_refused
from support import REPOSITORY, run_python

from tfdist.checkpoint.policy import FIRST_COST, CheckpointPolicy
from tfdist.errors import UserError
from tfdist.models.transformer import build_transformer
from tfdist.planning import documents, traced_step
from tfdist.planning.estimate import (
    LAYOUTS,
    OPTIMIZER,
    DeviceGroup,
    Layout,
    Limits,
    PlannedChoice,
    PlannedTraining,
    TracedStep,
    all_reduce_seconds,
    estimate_group,
    estimate_memory,
    plan_checkpoints,
    read_tuning,
)
from tfdist.planning.planning import apply_prices, choose_plans, describe_training, find_topology, parse_groups
from tfdist.planning.requests import read_request
from tfdist.planning.traced_step import EmptyVariable, LayerSize, SplitLayer, Step
from tfdist.tasks.supervised import Supervised
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tpu_compiler.devices import parse_slice, read_devices
from tfdist.training.run.train_settings import TrainSettings

SCHEMA = REPOSITORY / "tfdist" / "planning" / "plan.schema.json"
DIGITS = ["--gin_file=configs/experiments/digits.gin", "--gin_param=train.epochs = 2"]
PRICES = "--prices=l4=0.7,a100_40=3.7,v5e=1.2"
KNOWN = read_devices()
STEP = Step(
    rows=1,
    recomputes=False,
    layers=(LayerSize("dense", 10**9, 4 * 10**9),),
    parameter_bytes=4 * 10**9,
    slot_bytes=8 * 10**9,
    gradient_bytes=4 * 10**9,
    tensor_bytes=5 * 10**9,
    batch_bytes=10**6,
    num_operations=1000,
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
        first = some[0].choice
        found[kind] = (first.num_microbatches, first.layout.recomputes, first.layout.sharding)
        for each in some:
            assert each.memory_bytes <= 0.9 * each.group.device.memory_bytes
            assert each.choice.rows <= each.largest_rows
    assert found == expected


def test_sharing_takes_the_optimizers_part_alone() -> None:
    group = DeviceGroup(KNOWN["l4"], 8)
    layouts = (Layout(sharding=sharding) for sharding in (None, OPTIMIZER))
    choices = (PlannedChoice("float32", layout, num_microbatches=1, rows=1) for layout in layouts)
    whole, shared = (estimate_memory(STEP, group, choice) for choice in choices)
    assert whole - shared == STEP.slot_bytes * 7 / 8


def build_settings(model: Any, data: Any, loss: keras.losses.Loss) -> TrainSettings:
    task, optimizer = Supervised(loss=loss), keras.optimizers.AdamW
    return TrainSettings(
        model=model, train_data=lambda: data, optimizer=optimizer, task=task, global_batch_size=8, epochs=1
    )


def test_a_model_larger_than_any_memory_is_traced() -> None:
    wide = 1 << 21  # a kernel of 16 TiB

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(wide) for _ in range(2))])
        assert not np.any(model.layers[0].kernel.numpy())  # as a builder may
        return model

    data = np.zeros((8, 8), np.float32), np.zeros((8, 1), np.float32)
    settings = build_settings(build, data, keras.losses.MeanSquaredError())
    step = describe_training(settings, several=True).trace("float32", False)
    assert step is not None and step.small.parameter_bytes == 4 * (wide * wide + 10 * wide)
    assert step.small.slot_bytes == pytest.approx(2 * step.small.parameter_bytes)
    assert not isinstance(keras.Variable("zeros", shape=(1 << 18,)).value, EmptyVariable)


@pytest.mark.slow
def test_a_deep_model_is_planned_by_two_shallow_ones() -> None:
    build = functools.partial(build_transformer, vocabulary_size=8, length=8, width=256, num_layers=6)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    settings = build_settings(build, (np.zeros((8, 8), np.int32),) * 2, loss)
    asked: Any = types.SimpleNamespace(depth=6, approach=None)
    whole, deepened = (
        describe_training(settings, several=True, request=request).trace("bfloat16", True) for request in (None, asked)
    )
    assert whole is not None and deepened is not None
    assert whole.large.layers[1:] == deepened.large.layers[1:]  # but for the name of the input
    numbers = [name for name in traced_step.GROWING if getattr(whole.large, name) != getattr(deepened.large, name)]
    assert numbers == []


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
    nearest = rf"No plan meets --budget_usd=1e-12\. The cheapest is {best[0]}, the quickest {quick[0]}\. Write limits"
    with pytest.raises(UserError, match=nearest):
        choose_plans(found, Limits(budget_usd=1e-12))


def test_checkpoints_come_at_youngs_interval_and_their_cost_and_steps_done_twice_count() -> None:
    interval, lost = plan_checkpoints(CheckpointPolicy(mean_seconds_between_failures=7200))
    assert interval == pytest.approx((2 * FIRST_COST * 7200) ** 0.5)  # Young
    assert lost == pytest.approx(FIRST_COST / interval + interval / 2 / 7200)
    assert plan_checkpoints(None) == (None, 0.0)


BLOCKED = dataclasses.replace(
    STEP,
    layers=(
        LayerSize("tokens", 25 * 10**6, 10**8),
        *(
            LayerSize(f"block_{index}", 225 * 10**6, 9 * 10**8, 16, (SplitLayer(9 * 10**8, 1024, 4096, 4096),))
            for index in range(4)
        ),
    ),
)


def build_document(kind: str, count: int, step: Step = BLOCKED, **changes: Any) -> dict[str, Any]:
    """The document of a model of four blocks, checked by the published schema."""

    def trace(precision: str, recomputes: bool) -> TracedStep:
        sizes = ({name: getattr(step_of(n, recomputes=recomputes), name) for name in GROWING} for n in (8, 64))
        return TracedStep(*(dataclasses.replace(step, **each) for each in sizes))

    blocked = dataclasses.replace(training(), trace=trace, policy=CheckpointPolicy(), **changes)
    best = choose_plans(list(estimate_group(blocked, DeviceGroup(KNOWN[kind], count), None)), Limits())
    found = documents.build_document(best, blocked, Limits(), directory=RunDirectory("runs/a"))
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    return found


GROWING = ("rows", "recomputes", "tensor_bytes", "batch_bytes", "flops", "bytes_moved")


@pytest.mark.parametrize(
    ("approach", "strategy", "sharding", "stages"),
    [
        ("data_parallel", "mirrored", None, []),
        ("zero", "mirrored", "optimizer", []),
        ("fsdp", "mirrored", "weights", []),
        ("model_parallel", "mirrored", ["*"], []),
        ("pipeline_parallel", "pipelined", None, ["block_1", "block_2", "block_3"]),
    ],
)
def test_every_approach_is_planned_by_its_names(
    approach: str, strategy: str, sharding: object, stages: list[str]
) -> None:
    found = build_document("h200", 4, layouts=LAYOUTS[approach])
    assert found["strategy"] == {"approach": approach, "total_gpus": 4, "nodes": 1, "gpus_per_node": 4}
    assert found["distributedConfig"]["strategy"] == found["distributed_config"]["strategy"] == strategy
    assert found["resourceAllocation"]["shardingStrategy"] == sharding
    assert found["resourceAllocation"]["stages"] == stages


def test_weights_that_fit_nowhere_as_a_whole_are_shared() -> None:
    layers = tuple(LayerSize(f"block_{index}", 725 * 10**6, 29 * 10**8, 16) for index in range(4))
    large = dataclasses.replace(BLOCKED, parameter_bytes=12 * 10**9, layers=layers)
    found = build_document("t4", 8, large)
    assert found["strategy"] == {"approach": "fsdp", "total_gpus": 8, "nodes": 2, "gpus_per_node": 4}
    assert [each["devices"] for each in found["resourceAllocation"]["nodeAssignments"]] == [4, 4]
    assert found["distributedConfig"] == {
        "strategy": "multi_worker",
        "worldSize": 8,
        "backend": "nccl",
        "initMethod": "TF_CONFIG",
    }


def test_rdma_is_planned_where_the_machines_have_it() -> None:
    found = build_document("h200", 16)["rdma_config"]
    assert found["enabled"] and found["network"] == "GPUDirect RDMA" and found["expected_speedup"] > 1
    assert found["env_vars"]["NCCL_IB_DISABLE"] == "0" and found["env_vars"]["NCCL_NET_GDR_LEVEL"] == "SYS"
    plain = build_document("a100_40", 16)["rdma_config"]
    assert not plain["enabled"] and plain["env_vars"]["NCCL_IB_DISABLE"] == "1"


def test_checkpoints_are_planned_as_the_policy_has_them() -> None:
    assert plan_checkpoints(CheckpointPolicy(every_steps=100), 0.5)[0] == 50
    found = build_document("h200", 1)
    assert found["checkpointStrategy"] == {
        "frequency": 30.0,
        "storage": "runs/a/checkpoints",
        "retention": {"keep_last": 2, "keep_every_steps": None, "keep_best": None},
    }


def test_a_sweep_tells_a_plan_what_it_found(tmp_path: Path) -> None:
    result = {"mode": "tune", "best_values": {"train.seed": 3}, "best_objective": 0.9, "trials_by_status": {"done": 7}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    expected = {"best_params": {"train.seed": 3}, "best_score": 0.9, "trials_completed": 7}
    assert read_tuning(str(tmp_path)) == expected and read_tuning(str(tmp_path / "none")) is None


CLUSTER = {
    "modelConfig": {"path": "llm", "size": "20M", "framework": "tensorflow"},
    "dataConfig": {"path": "gs://bucket/texts", "size": "2GB", "sharding": "by worker"},
    "clusterConfig": {"numNodes": 2, "gpusPerNode": 4, "networkBandwidth": "100Gbps"},
    "trainingConfig": {"batchSize": 64, "epochs": 2, "parallelismStrategy": "fsdp"},
}
TASK = {
    "task_type": "design_pipeline",
    "training_context": {
        "model_type": "tabular",
        "framework": "tensorflow",
        "data_size_gb": 1.28,
        "compute_requirements": {"gpu_type": "a100", "gpu_count": 8, "memory_gb": 80, "storage_gb": 100},
        "training_config": {"epochs": 3, "batch_size": 1000, "distributed_strategy": "data_parallel"},
    },
}


def write_request(path: Path, content: dict[str, Any]) -> str:
    path.write_text(json.dumps(content))
    return f"--request={path}"


@pytest.mark.slow
def test_both_requests_are_answered_without_an_experiment(tmp_path: Path) -> None:
    found = []
    for name, content in {"cluster": CLUSTER, "task": TASK}.items():
        request = write_request(tmp_path / f"{name}.json", content)
        flags = ["--mode=plan", request, f"--run_dir={tmp_path / name}"]
        told = run_python(["-m", "tfdist.main", *flags], cwd=tmp_path).check()
        assert "--example=pipelines" in told.stdout and (tmp_path / name / "plan.gin").exists()
        found.append(json.loads((tmp_path / name / "plan.json").read_text()))
        jsonschema.validate(found[-1], json.loads(SCHEMA.read_text()))
    cluster, task = found
    assert cluster["strategy"] == {"approach": "fsdp", "total_gpus": 8, "nodes": 2, "gpus_per_node": 4}
    assert cluster["model"]["parameters"] == pytest.approx(20e6, rel=0.1)
    assert cluster["cost_estimate"]["total_steps"] == 2 * math.ceil(2e9 / 512 / 64)
    assert task["strategy"]["approach"] == "data_parallel" and task["resourceAllocation"]["device"] == "a100_80"
    assert task["batch_configuration"]["total_batch_size"] == 1000
    assert task["cost_estimate"]["total_steps"] == 3 * 10_000
    assert any("stands for tabular" in text for text in task["uncertain"])


@pytest.mark.slow
def test_a_request_changes_what_an_experiment_leaves_open(tmp_path: Path) -> None:
    training_config = {"batch_size": 36, "distributed_strategy": "none"}
    content = {"task_type": "manage_compute", "training_context": {"training_config": training_config}}
    plan(tmp_path, write_request(tmp_path / "request.json", content), "--devices=l4:1").check()
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["strategy"]["approach"] == "none" and found["batch_configuration"]["total_batch_size"] == 36
    assert found["model"]["parameters"] == 53_002 and "stands for" not in " ".join(found["uncertain"])


test_a_request_that_cannot_be_met_is_one_message = each_is_refused(
    lambda content, tmp_path: read_request(write_request(tmp_path / "request.json", content).partition("=")[2]),
    (CLUSTER | {"trainingConfig": {"parallelismStrategy": "deepspeed"}}, "'zero' shares the optimizer's state"),
    (CLUSTER | {"modelConfig": {"framework": "pytorch"}}, "Write one of tensorflow, keras. The nearest:"),
    (CLUSTER | {"modelConfig": {"sizes": "7B"}}, "has 'modelConfig.sizes', which no request has. Did you mean"),
    ({"modelConfig": {}, "dataConfig": {}}, "lacks clusterConfig. Write modelConfig, dataConfig, clusterConfig, or"),
    (CLUSTER | {"modelConfig": {"framework": ["keras"]}}, r"framework is \['keras'\], which tfdist does not have"),
    ({"task_type": "setup_automl", "training_context": {"compute_requirements": {"memory_gb": "40"}}}, "such as 40"),
    (CLUSTER | {"modelConfig": {"size": "large"}}, "'large' is no amount. Write a number, or such as '7B'"),
    (
        {"task_type": "tune", "training_context": {}},
        "task_type is 'tune', which tfdist does not have. Write one of design_pipeline, configure_distributed",
    ),
    (
        {"task_type": "setup_automl", "training_context": {"compute_requirements": {"gpu_count": 129}}},
        "gpu_count is 129. Write at most 128",
    ),
)


def plan(run_dir: Path, *flags: str) -> Any:
    return run_python(["-m", "tfdist.main", "--mode=plan", *DIGITS, f"--run_dir={run_dir}", *flags], cwd=REPOSITORY)


def plan_and_train(directory: Path, *flags: str, launch: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """Returns the plan, and what a training by it printed."""
    told = plan(directory, *flags).check()
    found = json.loads((directory / "plan.json").read_text())
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert found["batch_configuration"]["learning_rate"] == pytest.approx(0.004)
    assert found["model"]["parameters"] == 53_002 and found["cost_estimate"]["total_steps"] == 46
    assert "MFU" in told.stdout
    files = [*DIGITS, f"--gin_file={directory}/plan.gin", f"--run_dir={directory}/run"]
    return found, run_python(["-m", *launch, *files], cwd=REPOSITORY).check().stdout


@pytest.mark.slow
def test_a_plan_is_valid_and_trains_and_measurements_of_the_run_take_the_place_of_estimates(tmp_path: Path) -> None:
    limits = (PRICES, "--budget_usd=1", "--deadline=1")
    found, printed = plan_and_train(tmp_path, "--devices=l4:1,a100_40:8", *limits, launch=("tfdist.main",))
    assert found["resourceAllocation"]["device"] == "l4" and "train: one_device, " in printed
    assert found["resourceAllocation"]["nodeAssignments"][0]["workers"] == 1
    (tmp_path / "here.toml").write_text(
        "[here]\nmemory_gib = 8\nflops = {float32 = 1e11}\nmemory_bytes_per_second = 1e10\n"
        'link_bytes_per_second = 1e9\nper_machine = 1\nnames = ["CPU"]\n'
    )
    plan(tmp_path, f"--hardware={tmp_path}/here.toml", f"--from_run={tmp_path}/run").check()
    measured = json.loads((tmp_path / "plan.json").read_text())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert measured["performance_targets"]["throughput"] == pytest.approx(result["examples_per_second"])
    assert measured["basis"]["step_seconds"].startswith("measured in")
    told = plan(tmp_path, "--devices=l4:1", f"--from_run={tmp_path}/run").check()
    assert f"{tmp_path}/run ran on other devices" in " ".join(told.stdout.split())


@pytest.mark.slow
@pytest.mark.horovod
def test_a_plan_for_horovod_is_valid_and_trains(tmp_path: Path) -> None:
    flags = ("--gin_file=configs/strategies/horovod.gin", "--devices=h200:2", "--prices=h200=3")
    launch = ("tfdist.launch", "--workers=2", "--launcher=horovod", "--", "--gin_param=train.fast_check = True")
    found, printed = plan_and_train(tmp_path, *flags, launch=launch)
    assert found["distributed_config"]["strategy"] == "horovod" and "train: horovod, " in printed
    assert found["resourceAllocation"]["nodeAssignments"][0]["workers"] == 2


def test_strategies_follow_the_devices_and_an_experiment_with_horovod_keeps_it() -> None:
    groups = [*(DeviceGroup(KNOWN["h200"], count) for count in (1, 8, 16)), DeviceGroup(KNOWN["v5p"], 8)]
    for horovod, expected in [
        (False, [("one_device", 1), ("mirrored", 1), ("multi_worker", 2), ("tpu", 1)]),
        (True, [("one_device", 1), ("horovod", 8), ("horovod", 16), ("tpu", 1)]),
    ]:
        of_kind = dataclasses.replace(training(), horovod=horovod)
        found = [next(estimate_group(of_kind, group, None)) for group in groups]
        assert [(each.strategy, each.num_workers) for each in found] == expected


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


# The table of devices


def test_devices_are_named_with_or_without_a_number() -> None:
    named = [str(group) for group in parse_groups(["a100_40:8,l4", "v5e:16"], KNOWN)]
    assert named == ["a100_40:8", "l4:1", "l4:2", "l4:4", "l4:8", "v5e:16"]
    assert {group.device.kind for group in parse_groups([], KNOWN)} == set(KNOWN)


def test_prices_of_ones_own_take_the_place_of_the_tables() -> None:
    own = apply_prices(["a100_40=3.5,v5e=1.3"], KNOWN)
    assert DeviceGroup(own["a100_40"], 8).usd_per_hour == 28 and DeviceGroup(own["v5e"], 4).usd_per_hour == 5.2
    assert own["l4"] == KNOWN["l4"]


test_a_wrong_flag_is_one_message = each_is_refused(
    call,
    (lambda: parse_groups(["a100"], KNOWN), "--devices=a100 names none of"),
    (lambda: parse_groups(["l4:0"], KNOWN), "Write, for example, l4:8"),
    (lambda: apply_prices(["l4=cheap"], KNOWN), "'cheap' is no price"),
    (lambda: apply_prices(["l4=1/0.4"], KNOWN), "Write dollars for an hour of one"),
    (lambda: apply_prices(["l4=nan"], KNOWN), "no price"),
    (lambda: apply_prices(["l5=1"], KNOWN), "--prices=l5=1 names none of"),
    (lambda: read_devices("/nowhere.toml"), "is no table of devices"),
)


def read_changed(name: str, value: str, tmp_path: Path) -> None:
    """Reads a table of one's own, of which one row is changed."""
    rows = {"memory_gib": 8, "flops": "{float32 = 1e11}", "memory_bytes_per_second": 1, "link_bytes_per_second": 1}
    rows |= {"per_machine": 8, name: value}
    (tmp_path / "own.toml").write_text("\n".join(["[mine]", *(f"{name} = {value}" for name, value in rows.items())]))
    read_devices(str(tmp_path / "own.toml"))


test_a_table_of_ones_own_is_checked = each_is_refused(
    read_changed,
    ("flop", "1", "flop"),
    ("memory_gib", "'24'", "mine.memory_gib is '24'; write a number"),
    ("memory_bytes_per_second", "0", "mine.memory_bytes_per_second is 0; write"),
    ("flops", "6e13", "is no table of devices"),
)


def test_the_all_reduce_is_that_of_the_scaling_page() -> None:
    h200 = KNOWN["h200"]  # benchmarks/scaling.md: 4 GB among 64 replicas at 50 GB/s take 159 ms
    assert all_reduce_seconds(4e9, DeviceGroup(h200, 64)) == pytest.approx(0.159, abs=0.001)
    assert all_reduce_seconds(4e9, DeviceGroup(h200, 1)) == 0


def test_slices_are_as_near_to_squares_and_cubes_as_can_be() -> None:
    cases = {("v5e", 8): "v5e:2x4", ("v5e", 16): "v5e:4x4", ("v4", 4): "v4:2x2x1", ("v5p", 16): "v5p:4x2x2"}
    for (kind, count), topology in cases.items():
        assert find_topology(DeviceGroup(KNOWN[kind], count)) == topology
        assert parse_slice(topology).num_cores == count
    assert find_topology(DeviceGroup(KNOWN["v5e"], 12)) is None
