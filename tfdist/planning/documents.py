"""A plan for people, for programs (plan.json, whose schema is plan.schema.json), and for a training (plan.gin).

Invariant: what plan.gin sets is what the estimate is of. A fact has one value, under each of planners' names.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.checkpoint.catalog import KEEP_LAST
from tfdist.checkpoint.policy import ALL, FIRST_COST, CheckpointPolicy
from tfdist.planning.estimate import (
    ALLOCATED,
    COMPILED,
    ESTIMATED,
    HOROVOD,
    MESSAGE_SECONDS,
    SPLIT,
    USABLE,
    WEIGHTS,
    Estimate,
    Limits,
    MeasuredRun,
    PlannedTraining,
    exchange_seconds,
)
from tfdist.telemetry.console.console_text import align_columns, in_bytes
from tfdist.telemetry.registry import EVENTS, METRICS
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.run.train_settings import TrainSettings

CLASSES = {
    "one_device": "OneDevice",
    "mirrored": "Mirrored",
    "multi_worker": "MultiWorker",
    HOROVOD: "Horovod",
    "tpu": "TPU",
    "pipelined": "Pipelined",
}
GPU_REPLICAS = ("mirrored", "multi_worker", HOROVOD)  # whose gradients NCCL sums
INIT_METHODS = {"multi_worker": "TF_CONFIG", HOROVOD: "horovodrun", "tpu": "tpu"}
PIPELINES = {"airflow": "airflow_dag.py", "vertex": "vertex.yaml"}  # of examples/pipelines
GPU_UTILIZATION, CHECKPOINT_OVERHEAD = 0.8, 0.05  # at least; at most
ETHERNET = 12.5e9  # bytes a second of a machine without RDMA, as Google Cloud's A2 machines have it
BUFFER_BYTES = 4 << 20  # NCCL's own; larger ones may help where messages are large
BASES = {ESTIMATED: "graph", COMPILED: "compiler"}  # in the table's words; what is none of these is measured
# The columns of the page, by their headers.
COLUMNS: dict[str, Callable[[Estimate], str]] = {
    "devices": lambda each: str(each.group),
    "strategy": lambda each: each.strategy,
    "approach": lambda each: each.approach,
    "precision": lambda each: each.choice.precision,
    "microbatches": lambda each: f"{each.choice.num_microbatches} × {each.choice.rows}",
    "largest": lambda each: str(each.largest_rows),
    "memory": lambda each: f"{in_bytes(each.memory_bytes)} of {each.group.device.memory_gib:g} GiB",
    "step": lambda each: f"{1e3 * each.step_seconds:.3g} ms",
    "MFU": lambda each: f"{100 * each.utilization:.2g} %",
    "hours": lambda each: f"{each.hours:.3g}",
    "USD": lambda each: "–" if each.price is None else f"{each.price:.4g}",
    "time by": lambda each: BASES.get(each.basis[0], "run"),
    "memory by": lambda each: BASES.get(each.basis[1], "run"),
}
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
    best: Sequence[Estimate],
    training: PlannedTraining,
    limits: Limits,
    *,
    measured: MeasuredRun | None = None,
    tuning: dict[str, Any] | None = None,
    notes: Sequence[str] = (),
    directory: RunDirectory,
) -> dict[str, Any]:
    """Builds the content of plan.json; facts that planners know by two names have both."""
    first, policy, step = best[0], training.policy, best[0].step
    is_nccl = first.strategy in GPU_REPLICAS
    orchestrator = "airflow" if first.group.num_machines == 1 and not first.group.device.is_tpu else "vertex"
    backend = "nccl" if is_nccl else "xla" if first.group.device.is_tpu else None
    distributed = {"strategy": first.strategy, "world_size": first.group.count, "backend": backend}
    checkpoint = {
        "approach": None if policy is None else ALL if first.choice.layout.sharding else policy.writers,
        "async": policy is not None,  # a thread writes
        "compression": None,
        "storage": None if policy is None else directory.checkpoints,
        "frequency": first.interval_seconds,
        "retention": policy and _describe_retention(policy),
        "expected_recovery_time": first.interval_seconds and first.interval_seconds / 2,
        "state_bytes": step.state_bytes,
        "cost_seconds": FIRST_COST if policy is not None else None,
    }
    return {
        "version": 2,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "limits": {"budget_usd": limits.budget_usd, "deadline_hours": limits.deadline_hours},
        "from_run": None if measured is None else measured.path,
        "basis": {"step_seconds": first.basis[0], "memory_bytes": first.basis[1]},
        "strategy": _describe_strategy(first),
        "model": _describe_model(first),
        "batch_configuration": _describe_batch(first, training),
        "distributed_config": distributed,
        "distributedConfig": {
            **{re.sub("_(.)", lambda match: match[1].upper(), name): value for name, value in distributed.items()},
            "initMethod": INIT_METHODS.get(first.strategy),
        },
        "resourceAllocation": {
            "nodeAssignments": [
                {"node": node, "devices": here, "workers": here if first.strategy == HOROVOD else 1}
                for node, here in enumerate(first.group.per_node)
            ],
            "memoryPerNode": int(first.memory_bytes) * first.group.per_node[0],
            "shardingStrategy": first.choice.layout.setting,
            "stages": list(first.choice.stages),
            **_describe_device(first),
        },
        "rdma_config": _describe_rdma(first),
        "checkpoint_strategy": checkpoint,
        "checkpointStrategy": {name: checkpoint[name] for name in ("frequency", "storage", "retention")},
        "faultTolerance": {
            "elasticTraining": policy is not None and first.strategy in INIT_METHODS and not first.group.device.is_tpu,
            "recoveryStrategy": "begin again" if policy is None else "resume from the newest checkpoint that verifies",
            "healthChecks": ["tfdist doctor", *(["tfdist launch"] if first.num_workers > 1 else [])],
            "mean_seconds_between_failures": policy and policy.mean_seconds_between_failures,
            "lost_share": first.lost_share,
        },
        "monitoringSetup": {
            "metrics": [metric.exposed_name for metric in METRICS.values()],
            "alerts": [name for name, (level, _) in EVENTS.items() if level == "error"],
            "dashboardUrl": training.dashboard,
        },
        "performance_targets": {
            "throughput": training.global_batch_size / first.step_seconds,
            "gpu_utilization": GPU_UTILIZATION,
            "checkpoint_overhead": CHECKPOINT_OVERHEAD,
            "step_seconds": first.step_seconds,
            "model_flops_utilization": first.utilization,
            "compute_seconds": first.compute_seconds,
            "memory_seconds": first.memory_seconds,
            "all_reduce_seconds": first.reduce_seconds,
        },
        "pipeline_config": {
            "orchestrator": orchestrator,
            "steps": ["validate", "train", "evaluate", "gate", "export"] if orchestrator == "airflow" else ["train"],
            "triggers": ["schedule", "event", "manual"] if orchestrator == "airflow" else ["manual"],
            "example": PIPELINES[orchestrator],
        },
        "tuning_results": tuning or {"best_params": None, "best_score": None, "trials_completed": 0},
        "verification_steps": [
            "tfdist doctor",
            "tfdist validate EXPERIMENT.gin plan.gin",
            "tfdist train EXPERIMENT.gin plan.gin train.fast_check=True",
            "tfdist plan EXPERIMENT.gin --from_run=RUN_DIR, after a short training",
        ],
        "cost_estimate": {"total_steps": training.total_steps, **_describe_cost(first)},
        "alternatives": [
            {"strategy": _describe_strategy(each), **_describe_device(each), "cost_estimate": _describe_cost(each)}
            for each in best[1:]
        ],
        "assumptions": list(ASSUMPTIONS),
        "uncertain": [*notes, *list_uncertainties(first)],
    }


def _describe_retention(policy: CheckpointPolicy) -> dict[str, Any]:
    kept = {"keep_every_steps": policy.keep_every_steps, "keep_best": policy.keep_best}
    return {"keep_last": policy.keep_last or KEEP_LAST, **kept}


def _describe_strategy(each: Estimate) -> dict[str, Any]:
    nodes = {"nodes": each.group.num_machines, "gpus_per_node": each.group.per_node[0]}
    return {"approach": each.approach, "total_gpus": each.group.count, **nodes}


def list_uncertainties(each: Estimate) -> list[str]:
    """Lists the parts of an estimate that may be far off."""
    texts = []
    if each.choice.precision == "bfloat16":
        texts.append("bfloat16 rounds more than float32: compare a metric of both before a long run.")
    if each.choice.layout.sharding in (WEIGHTS, SPLIT):
        texts.append(
            f"Some optimizers and layers do not go with train.sharding = {each.choice.layout.setting!r}: "
            "train.fast_check = True finds out."
        )
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
        f"train.sharding = {choice.layout.setting!r}",
    ]
    if choice.stages:
        lines.append(f"pipelined.Pipelined.stages = {list(choice.stages)}")
    if choice.layout.recomputes and settings.recompute is None:
        lines.append("train.recompute = 'auto'")
    return "\n".join(lines) + "\n"


def _describe_model(each: Estimate) -> dict[str, Any]:
    step, number = each.step, each.choice.num_microbatches
    return {
        "parameters": sum(step.parameters.values()),
        "parameters_by_group": step.parameters,
        "parameter_bytes": step.parameter_bytes,
        "optimizer_bytes": step.slot_bytes // (each.group.count if each.choice.layout.sharding else 1),
        "gradient_bytes": step.gradient_bytes,
        "tensor_bytes": int(step.tensor_bytes),
        "batch_bytes": int(step.batch_bytes * number),
        "flops": step.flops * number,
        "bytes_moved": step.bytes_moved * number,
        "bytes_reduced": step.reduced_bytes if each.group.count > 1 else 0,
    }


def _describe_batch(each: Estimate, training: PlannedTraining) -> dict[str, Any]:
    choice, (rate, warmup) = each.choice, training.rate
    largest = each.largest_rows * (1 if choice.stages else each.group.count)
    factor = max(1.0, largest / training.global_batch_size)
    return {
        "per_gpu_batch_size": choice.rows,
        "total_batch_size": training.global_batch_size,
        "gradient_accumulation_steps": choice.num_microbatches,
        # The batch stays the experiment's, and so does the rate that goes with it.
        "learning_rate": rate,
        "warmup_epochs": warmup,
        "precision": choice.precision,
        "gradient_checkpointing": each.step.recomputes,
        "at_largest_batch": {
            "per_gpu_batch_size": each.largest_rows,
            "total_batch_size": largest,
            "learning_rate": rate and rate * factor,
            "learning_rate_adaptive": rate and rate * math.sqrt(factor),
            "warmup_epochs": WARM_UP_EPOCHS if factor > 1 else warmup,
        },
    }


def _describe_device(each: Estimate) -> dict[str, Any]:
    return {
        "device": each.group.device.kind,
        "memory_bytes": int(each.memory_bytes),
        "memory_of_device_bytes": int(each.group.device.memory_bytes),
    }


def _describe_rdma(each: Estimate) -> dict[str, Any]:
    group, is_nccl, crosses = each.group, each.strategy in GPU_REPLICAS, each.group.num_machines > 1
    enabled = is_nccl and crosses and "RDMA" in (group.device.network or "")
    slower = dataclasses.replace(group.device, network_bytes_per_second=ETHERNET / group.device.per_machine)
    longer = exchange_seconds(each.step, dataclasses.replace(group, device=slower), each.choice) - each.reduce_seconds
    variables = {
        "NCCL_IB_DISABLE": str(int(not enabled)),
        "NCCL_NET_GDR_LEVEL": "SYS" if enabled else "LOC",
        "NCCL_BUFFSIZE": str(BUFFER_BYTES),
    }
    return {
        "enabled": enabled,
        "platform": "nccl" if is_nccl else None,
        "network": group.device.network if crosses else None,
        "expected_speedup": 1 + max(0.0, longer) / each.step_seconds if enabled else None,
        "env_vars": variables if is_nccl and crosses else {},
    }


def _describe_cost(each: Estimate) -> dict[str, Any]:
    return {
        "hourly_cost_usd": each.group.usd_per_hour,
        "estimated_duration_hours": each.hours,
        "total_cost_usd": each.price,
        "device_hours": each.device_hours,
    }


def format_page(best: Sequence[Estimate], uncertain: Sequence[str]) -> str:
    """The plan and the next best, one a line, and what of it is uncertain; plan.json has what they rest on."""
    count = sum(best[0].step.parameters.values())
    rows = [[value(each) for value in COLUMNS.values()] for each in best]
    lines = [f"{count:,} parameters", "", align_columns([list(COLUMNS), *rows], list(COLUMNS)), ""]
    return "\n".join([*lines, *(f"uncertain: {each}" for each in uncertain)])
