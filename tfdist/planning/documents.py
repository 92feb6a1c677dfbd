"""A plan for people, for programs (plan.json, whose schema is plan.schema.json), and for a training (plan.gin).

Invariant: what plan.gin sets is what the estimate is of. Both planners' names of the fields are there, those of the one
in camel case; what they share stands in both.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

from tfdist.checkpoint.policy import FIRST_COST
from tfdist.planning.estimate import (
    ALLOCATED,
    COMPILED,
    ESTIMATED,
    HOROVOD,
    MEASURED,
    MESSAGE_SECONDS,
    OPTIMIZER,
    USABLE,
    Estimate,
    Limits,
    MeasuredRun,
    PlannedTraining,
)
from tfdist.telemetry.console.console_text import align_columns, in_bytes
from tfdist.training.run.train_settings import TrainSettings

CLASSES = {
    "one_device": "OneDevice",
    "mirrored": "Mirrored",
    "multi_worker": "MultiWorker",
    HOROVOD: "Horovod",
    "tpu": "TPU",
}
HEADERS = (
    *("devices", "strategy", "precision", "microbatches", "largest", "memory", "step", "MFU", "hours", "USD"),
    *("time by", "memory by"),
)
BASES = {MEASURED: "run", COMPILED: "compiler", ESTIMATED: "graph"}  # in the table's words
WARM_UP_EPOCHS = 5  # Goyal et al., "Accurate, Large Minibatch SGD", 2017
ASSUMPTIONS = (
    "A step takes the longer of its products and its bytes, at the makers' peak rates, and its all-reduce besides: it "
    "takes no less.",
    f"A message takes {1e6 * MESSAGE_SECONDS:g} µs; the all-reduce is one ring, and nothing else goes on meanwhile.",
    f"{100 * USABLE:.0f} % of a device's memory can be used; tensors take {ALLOCATED} times what they hold.",
    "Bytes moved are those of every operation by itself: XLA, which fuses operations, moves fewer.",
    "Input is quick enough, and evaluations take no time.",
)


def build_document(
    best: Sequence[Estimate], training: PlannedTraining, limits: Limits, measured: MeasuredRun | None
) -> dict[str, Any]:
    """Builds the content of plan.json."""
    first = best[0]
    checkpoint = {
        "state_bytes": first.step.state_bytes,
        "every_seconds": first.interval_seconds,
        "cost_seconds": FIRST_COST if training.policy is not None else None,
        "rule": "Young's interval, which train.checkpoint = 'auto' keeps to by itself",
    }
    distributed = {
        "strategy": first.strategy,
        "num_workers": first.num_workers,
        "num_replicas": first.group.count,
        "sharding": first.choice.sharding,
        "shards_optimizer": first.choice.sharding == OPTIMIZER,
    }
    return {
        "version": 1,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "limits": {"budget_usd": limits.budget_usd, "deadline_hours": limits.deadline_hours},
        "from_run": None if measured is None else measured.path,
        "basis": {"step_seconds": first.basis[0], "memory_bytes": first.basis[1]},
        "strategy": first.strategy,
        "model": _describe_model(first),
        "batch_configuration": _describe_batch(first, training),
        "distributed_config": distributed,
        "distributedConfig": distributed,
        "resourceAllocation": _describe_resources(first),
        "rdma_config": _describe_rdma(first),
        "checkpoint_strategy": checkpoint,
        "checkpointStrategy": checkpoint,
        "faultTolerance": {
            "resumes": training.policy is not None,
            "mean_seconds_between_failures": training.policy and training.policy.mean_seconds_between_failures,
            "restarts": "tfdist launch starts all workers again after a failure",
            "lost_share": first.lost_share,
        },
        "monitoringSetup": {"files": ["metrics.jsonl", "events.jsonl", "tensorboard/"], "ends_with": "result.json"},
        "performance_targets": {
            "step_seconds": first.step_seconds,
            "examples_per_second": training.global_batch_size / first.step_seconds,
            "model_flops_utilization": first.utilization,
            "compute_seconds": first.compute_seconds,
            "memory_seconds": first.memory_seconds,
            "all_reduce_seconds": first.reduce_seconds,
        },
        "pipeline_config": {"steps": ["validate", "fast_check", "train", "evaluate", "export"]},
        "verification_steps": [
            "tfdist doctor",
            "tfdist validate EXPERIMENT.gin plan.gin",
            "tfdist train EXPERIMENT.gin plan.gin train.fast_check=True",
            "tfdist plan EXPERIMENT.gin --from_run=RUN_DIR, after a short training",
        ],
        "cost_estimate": {"total_steps": training.total_steps, **_describe_cost(first)},
        "alternatives": [
            _describe_resources(each) | {"strategy": each.strategy, **_describe_cost(each)} for each in best[1:]
        ],
        "assumptions": list(ASSUMPTIONS),
        "uncertain": list_uncertainties(first),
    }


def list_uncertainties(each: Estimate) -> list[str]:
    """Lists the parts of an estimate that may be far off."""
    texts = []
    if each.choice.precision == "bfloat16":
        texts.append("bfloat16 rounds more than float32: compare a metric of both before a long run.")
    if each.step.uncertain:
        texts.append(
            f"{len(each.step.uncertain)} operations have shapes that depend on values, and count with the most that "
            f"these can be: {', '.join(each.step.uncertain[:3])}."
        )
    return texts


def format_gin(each: Estimate, settings: TrainSettings) -> str:
    """Formats plan.gin."""
    name, choice = each.strategy, each.choice
    lines = [
        f"# By --mode=plan, for {each.group}; give it after the experiment's own file.",
        "from __gin__ import dynamic_registration",
        f"from tfdist.strategies import {name}",
        "",
        f"train.strategy = @{name}.{CLASSES[name]}()",
        f"train.precision = {choice.precision!r}",
        f"train.num_microbatches = {choice.num_microbatches}",
        f"train.sharding = {choice.sharding!r}",
    ]
    if choice.recomputes and settings.recompute is None:
        lines.append("train.recompute = 'auto'")
    return "\n".join(lines) + "\n"


def _describe_model(each: Estimate) -> dict[str, Any]:
    step, number = each.step, each.choice.num_microbatches
    return {
        "parameters": sum(step.parameters.values()),
        "parameters_by_group": step.parameters,
        "parameter_bytes": step.parameter_bytes,
        "optimizer_bytes": step.slot_bytes // (each.group.count if each.choice.sharding else 1),
        "gradient_bytes": step.gradient_bytes,
        "tensor_bytes": int(step.tensor_bytes),
        "batch_bytes": int(step.batch_bytes * number),
        "flops": step.flops * number,
        "bytes_moved": step.bytes_moved * number,
        "bytes_reduced": step.reduced_bytes if each.group.count > 1 else 0,
    }


def _describe_batch(each: Estimate, training: PlannedTraining) -> dict[str, Any]:
    choice, largest = each.choice, each.largest_rows * each.group.count
    return {
        "global_batch_size": training.global_batch_size,
        "num_microbatches": choice.num_microbatches,
        "microbatch_size": choice.rows,
        "largest_microbatch_size": each.largest_rows,
        "precision": choice.precision,
        "gradient_checkpointing": choice.recomputes,
        # The batch stays the experiment's, and so does the rate that goes with it.
        "learning_rate_factor": 1.0,
        "warmup_epochs": 0,
        "at_largest_batch": {
            "global_batch_size": largest,
            "learning_rate_factor": max(1.0, largest / training.global_batch_size),
            "learning_rate_factor_adaptive": max(1.0, math.sqrt(largest / training.global_batch_size)),
            "warmup_epochs": WARM_UP_EPOCHS if largest > training.global_batch_size else 0,
        },
    }


def _describe_resources(each: Estimate) -> dict[str, Any]:
    return {
        "device": each.group.device.kind,
        "count": each.group.count,
        "memory_bytes": int(each.memory_bytes),
        "memory_of_device_bytes": int(each.group.device.memory_bytes),
    }


def _describe_rdma(each: Estimate) -> dict[str, Any]:
    is_nccl = each.strategy in ("mirrored", "multi_worker", HOROVOD)
    uses_network = each.group.num_machines > 1
    between = {"NCCL_SOCKET_IFNAME": "", "NCCL_IB_DISABLE": "0"} if is_nccl and uses_network else {}
    return {
        "uses_network": uses_network,
        "environment": {"NCCL_DEBUG": "WARN", **between} if is_nccl else {},
        "note": "Empty values are this cluster's own: the network interface of the workers' addresses."
        if between
        else "Nothing has to be set.",
    }


def _describe_cost(each: Estimate) -> dict[str, Any]:
    return {"hours": each.hours, "device_hours": each.device_hours, "usd": each.price}


def format_page(best: Sequence[Estimate], training: PlannedTraining) -> str:
    """The plan, the next best, and what both rest on."""
    first = best[0]
    step, number, choice = first.step, first.choice.num_microbatches, first.choice
    groups = ", ".join(f"{name} {count:,}" for name, count in step.parameters.items())
    lines = [
        f"{sum(step.parameters.values()):,} parameters ({groups})",
        f"a replica: weights {in_bytes(step.parameter_bytes)}, optimizer {in_bytes(step.slot_bytes)}, gradients "
        f"{in_bytes(step.gradient_bytes)}, tensors at the peak {in_bytes(step.tensor_bytes)}",
        f"a step of it: {step.flops * number:.3g} flops, {in_bytes(step.bytes_moved * number)} moved, "
        f"{in_bytes(step.reduced_bytes if first.group.count > 1 else 0)} reduced; {training.total_steps:,} steps",
        "",
        align_columns([HEADERS, *map(_row, best)], HEADERS),
        "",
        f"plan: {first.group}, {first.strategy}, {choice.precision}, "
        f"{number} microbatch{'es' if number > 1 else ''} of {choice.rows} examples"
        + (", gradient checkpointing" if choice.recomputes else "")
        + (f", train.sharding = {choice.sharding!r}" if choice.sharding else ""),
        f"all-reduce {1e3 * first.reduce_seconds:.3g} ms beside {1e3 * first.compute_seconds:.3g} ms of products and "
        f"{1e3 * first.memory_seconds:.3g} ms of memory",
    ]
    if first.interval_seconds is not None:
        lines.append(
            f"a checkpoint of {in_bytes(step.state_bytes)} every {first.interval_seconds:.0f} s, "
            f"{100 * first.lost_share:.2g} % of the time lost to checkpoints and repeated steps"
        )
    lines.append(f"time: {first.basis[0]}; memory: {first.basis[1]}")
    return "\n".join([*lines, *(f"uncertain: {each}" for each in list_uncertainties(first))])


def _row(each: Estimate) -> tuple[str, ...]:
    return (
        str(each.group),
        each.strategy,
        each.choice.precision,
        f"{each.choice.num_microbatches} × {each.choice.rows}",
        str(each.largest_rows),
        f"{in_bytes(each.memory_bytes)} of {each.group.device.memory_gib:g} GiB",
        f"{1e3 * each.step_seconds:.3g} ms",
        f"{100 * each.utilization:.2g} %",
        f"{each.hours:.3g}",
        "–" if each.price is None else f"{each.price:.4g}",
        *(next(word for beginning, word in BASES.items() if basis.startswith(beginning)) for basis in each.basis),
    )
