"""How long a training takes on so many devices of a kind, and with which settings it fits there.

Invariant: a time is a roofline, the least that the makers' figures allow, unless a run has measured it; each estimate
says what it rests on. Memory, operations and bytes come from the traced step (`traced_step`) or from a TPU's compiler.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.checkpoint.policy import FIRST_COST, CheckpointPolicy, CheckpointSchedule
from tfdist.errors import UserError
from tfdist.planning.traced_step import ALLOCATED, SplitLayer, Step, extrapolate
from tfdist.telemetry.records import load_record
from tfdist.telemetry.result import TUNE, RunResult, read_result
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tpu_compiler.devices import Device

USABLE = 0.9  # of a device's memory: an assumption; the driver, its libraries and workspaces of kernels need the rest
MESSAGE_SECONDS = 10e-6  # of a message, however small: the assumption of benchmarks/scaling.md
MOST_MICROBATCHES = 64
OPTIMIZER, WEIGHTS, SPLIT = "optimizer", "weights", ("*",)  # values of train.sharding; the last splits all that can be
HOROVOD = "horovod"
ESTIMATED = "traced graph and the makers' figures"
COMPILED = "the TPU's compiler"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a training is spread over devices: what is computed again, what replicas share, whether layers are staged."""

    recomputes: bool = False
    sharding: str | tuple[str, ...] | None = None
    is_staged: bool = False

    @property
    def setting(self) -> str | list[str] | None:
        """The value of train.sharding as a user writes it."""
        return list(self.sharding) if isinstance(self.sharding, tuple) else self.sharding


# By the names that planners know.
LAYOUTS = {
    "data_parallel": (Layout(), Layout(recomputes=True)),
    "zero": (Layout(recomputes=True, sharding=OPTIMIZER), Layout(sharding=OPTIMIZER)),
    "fsdp": (Layout(sharding=WEIGHTS),),
    "model_parallel": (Layout(sharding=SPLIT),),
    "pipeline_parallel": (Layout(is_staged=True),),
}
PLAIN = (*LAYOUTS["data_parallel"], LAYOUTS["zero"][0])  # the first of these that fits, else the quickest of the others
ON_ONE_DEVICE = "none"


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """A number of devices of one kind."""

    device: Device
    count: int

    def __str__(self) -> str:
        return f"{self.device.kind}:{self.count}"

    @property
    def num_machines(self) -> int:
        """The number of machines, or of slices of TPUs."""
        return math.ceil(self.count / self.device.per_machine)

    @property
    def per_node(self) -> list[int]:
        """The devices of each machine, of which the last may have fewer."""
        each = self.device.per_machine
        return [min(each, self.count - first) for first in range(0, self.count, each)]

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all devices; None where no price is known."""
        price = self.device.usd_per_hour
        return None if price is None else self.count * price


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """A finished run, whose measurements count: throughput is of its last start, evaluations included."""

    path: str
    result: RunResult

    def ran_on(self, group: DeviceGroup) -> bool:
        """Returns whether the run was on so many of these devices."""
        accelerators = self.result.hardware.get("accelerators") or ["CPU"]
        names = [name for name in group.device.names if any(name in each for each in accelerators)]
        return bool(names) and self.result.num_replicas == group.count


def read_tuning(path: str) -> dict[str, Any] | None:
    """Reads what a finished sweep has found, in planners' names; None where the directory has none."""
    result = load_record(RunDirectory(path).result, dict[str, Any])
    if result is None or result.get("mode") != TUNE:
        return None
    return {
        "best_params": result["best_values"],
        "best_score": result["best_objective"],
        "trials_completed": result["trials_by_status"].get("done", 0),
    }


def read_measured_run(path: str) -> MeasuredRun:
    """Reads throughput and hardware of a finished run; raises UserError if the directory has none."""
    directory = RunDirectory(path)
    result = read_result(directory)
    if result is None:
        raise UserError(f"--from_run={path} holds no finished run: there is no {directory.result}.")
    if not result.examples_per_second or not result.num_replicas:
        raise UserError(f"--from_run={path} holds no measurements: {directory.result} has no examples_per_second.")
    return MeasuredRun(directory.path, result)


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """The step traced with two sizes of a microbatch; what another size needs lies on the line through both."""

    small: Step
    large: Step

    def estimate_step(self, rows: int) -> Step:
        """The step with so many rows in a microbatch."""
        if self.small.rows == self.large.rows:
            return self.small
        more = self.large.rows - self.small.rows
        activations = (self.large.tensor_bytes - self.small.tensor_bytes) * rows // more
        step = extrapolate(self.small, self.large, (rows - self.small.rows) / more)
        return dataclasses.replace(step, rows=rows, activation_bytes=activations)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """The training that is planned.

    Attributes:
      trace: the step by precision and whether blocks are computed again; None where that is not possible.
      precisions: that may be chosen.
      compile_step: memory, flops and bytes that a TPU's compiler tells of a step; None: there is none.
      policy: of its checkpoints.
      horovod: whether Horovod is to be used where several GPUs are.
      steps_per_epoch: None where it does not matter.
      layouts: that go with the experiment's settings and with what was asked for.
      rate: the highest learning rate, and the epochs before it.
      dashboard: the address of a tracker; None: there is none, or it is not known.
    """

    global_batch_size: int
    total_steps: int
    precisions: tuple[str, ...]
    trace: Callable[[str, bool], TracedStep | None]
    compile_step: Callable[[DeviceGroup, PlannedChoice], tuple[float, float, float] | None]
    policy: CheckpointPolicy | None
    horovod: bool = False
    steps_per_epoch: int | None = None
    layouts: Sequence[Layout] = tuple(layout for layouts in LAYOUTS.values() for layout in layouts)
    rate: tuple[float | None, float] = (None, 0.0)
    dashboard: str | None = None

    def strategy(self, group: DeviceGroup, *, is_staged: bool = False) -> str:
        """The name of the strategy's module."""
        if is_staged:
            return "pipelined"
        if group.device.is_tpu:
            return "tpu"
        if group.count == 1:
            return "one_device"
        if self.horovod:
            return HOROVOD
        return "mirrored" if group.num_machines == 1 else "multi_worker"


@dataclasses.dataclass(frozen=True)
class PlannedChoice:
    """Settings that an estimate is of.

    Attributes:
      rows: of a microbatch on one replica.
      stages: the layers that begin them, but the first.
      largest_stage: its share of the weights.
    """

    precision: str
    layout: Layout
    num_microbatches: int
    rows: int
    stages: tuple[str, ...] = ()
    largest_stage: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A training on a group of devices; bytes and seconds are of one replica and step.

    Attributes:
      strategy: the name of its module.
      largest_rows: of a microbatch that fits.
      memory_bytes: at the peak.
      compute_seconds, memory_seconds: what products and what moving bytes take at the most that the device can do.
      reduce_seconds: of the all-reduces, as if nothing else went on meanwhile.
      utilization: of the device's arithmetic, with a step of `step_seconds`.
      interval_seconds: between checkpoints; None: there are none.
      lost_share: of the time, to checkpoints and to steps done twice.
      price: in US dollars; None: nobody said what a device costs.
      basis: what the step's time rests on, and what its memory does.
    """

    group: DeviceGroup
    strategy: str
    choice: PlannedChoice
    step: Step
    largest_rows: int
    memory_bytes: float
    compute_seconds: float
    memory_seconds: float
    reduce_seconds: float
    step_seconds: float
    utilization: float
    interval_seconds: float | None
    lost_share: float
    hours: float
    price: float | None
    basis: tuple[str, str]

    def __str__(self) -> str:
        price = "" if self.price is None else f" and {self.price:.4g} USD"
        return f"{self.group} with {self.hours:.3g} hours{price}"

    @property
    def approach(self) -> str:
        """How the training is spread, as planners call it."""
        if self.group.count == 1:
            return ON_ONE_DEVICE
        return next(name for name, layouts in LAYOUTS.items() if self.choice.layout in layouts)

    @property
    def num_workers(self) -> int:
        """The number of processes: Horovod's have one device each."""
        return self.group.count if self.strategy == HOROVOD else self.group.num_machines

    @property
    def device_hours(self) -> float:
        return self.hours * self.group.count


@dataclasses.dataclass(frozen=True)
class Limits:
    """Budget in USD and deadline in hours of a plan; None is no limit."""

    budget_usd: float | None = None
    deadline_hours: float | None = None

    def __str__(self) -> str:
        limits = {"budget_usd": self.budget_usd, "deadline": self.deadline_hours}
        return " and ".join(f"--{flag}={limit:g}" for flag, limit in limits.items() if limit is not None)

    def allow(self, estimate: Estimate) -> bool:
        """Whether an estimate keeps all limits; one without a price exceeds any budget."""
        is_paid = self.budget_usd is None or (estimate.price is not None and estimate.price <= self.budget_usd)
        return is_paid and (self.deadline_hours is None or estimate.hours <= self.deadline_hours)


def estimate_group(training: PlannedTraining, group: DeviceGroup, measured: MeasuredRun | None) -> Iterator[Estimate]:
    """The quickest settings of each precision with which the training fits on a group; none where it does not."""
    if group.device.bytes_per_second(group.count) is None:
        return
    for precision in training.precisions:
        if precision in group.device.flops:
            for layout in _list_layouts(training, group):
                found = _fit(training, group, precision, layout)
                if found is not None:
                    yield _estimate(training, group, *found, measured)
                    if layout in PLAIN:
                        break


def estimate_memory(step: Step, group: DeviceGroup, choice: PlannedChoice) -> float:
    """Bytes of one device at the peak; several microbatches keep the sum of their gradients."""
    count = group.count
    slots = step.slot_bytes / (count if choice.layout.sharding else 1)
    gradients: float = step.gradient_bytes if choice.num_microbatches > 1 else 0
    if choice.stages:  # all microbatches may be on their way
        part = choice.largest_stage
        tensors = part * (step.tensor_bytes + (choice.num_microbatches - 1) * step.activation_bytes)
        return part * (step.parameter_bytes + slots + gradients) + ALLOCATED * tensors + 2 * step.batch_bytes
    elsewhere = _shared_bytes(step, group, choice) * (count - 1) / count
    weights, tensors = step.parameter_bytes - elsewhere, max(step.tensor_bytes - elsewhere, step.activation_bytes)
    if choice.layout.sharding == WEIGHTS:  # the weights and gradients of two blocks are whole at a time
        weights += 4 * max(each.trained_bytes for each in step.layers if each.num_shared is not None)
    elif choice.layout.sharding == SPLIT:  # the rows of all replicas go in, and are kept for the backward pass
        tensors += (count - 1) * choice.rows * sum(each.input_bytes for each in _splits(step, group))
    if choice.layout.sharding in (WEIGHTS, SPLIT):
        gradients /= count
    return weights + slots + gradients + ALLOCATED * tensors + 2 * step.batch_bytes


def _list_layouts(training: PlannedTraining, group: DeviceGroup) -> Sequence[Layout]:
    """Lists the layouts that may be planned for a group; those where one suffices come first."""
    if group.count == 1:
        return LAYOUTS["data_parallel"]
    layouts = sorted(training.layouts, key=lambda each: each not in PLAIN)
    return [each for each in layouts if not group.device.is_tpu or each in LAYOUTS["data_parallel"]]


def _fit(
    training: PlannedTraining, group: DeviceGroup, precision: str, layout: Layout
) -> tuple[PlannedChoice, Step, int] | None:
    """The fewest microbatches with which the training fits on a group in a layout; None where it does not."""
    usable = USABLE * group.device.memory_bytes
    traced = training.trace(precision, layout.recomputes or layout.sharding == WEIGHTS or layout.is_staged)
    if traced is None and layout.is_staged:
        traced = training.trace(precision, False)
    if traced is None or not _suits(traced.small, group, layout):
        return None
    stages, share = choose_stages(traced.small, group.count) if layout.is_staged else ((), 1.0)
    replicas = 1 if stages else group.count
    for number in (2**power for power in range(MOST_MICROBATCHES.bit_length())):
        if training.global_batch_size < replicas * number:
            break
        if (group.device.is_tpu or layout.sharding == SPLIT) and training.global_batch_size % (replicas * number):
            continue
        if stages and number < min(4 * group.count, MOST_MICROBATCHES, training.global_batch_size // 2):
            continue  # fewer leave the stages waiting (GPipe)
        rows = math.ceil(training.global_batch_size / replicas / number)
        step = traced.estimate_step(rows)
        choice = PlannedChoice(precision, layout, number, rows, stages, share)
        if estimate_memory(step, group, choice) <= usable:
            return choice, step, _estimate_largest_rows(traced, group, choice, usable)
    return None


def _suits(step: Step, group: DeviceGroup, layout: Layout) -> bool:
    """Whether a model's layers can be shared so."""
    if layout.sharding == WEIGHTS:
        counts = [each.num_shared for each in step.layers if each.num_shared is not None]
        return bool(counts) and min(counts) >= group.count
    if layout.is_staged:
        return group.num_machines == 1 and len(choose_stages(step, group.count)[0]) == group.count - 1
    return layout.sharding != SPLIT or bool(_splits(step, group))


def choose_stages(step: Step, count: int) -> tuple[tuple[str, ...], float]:
    """Returns the layers that begin the stages but the first, and the largest stage's share of the weights."""
    total, names, sizes = sum(each.trained_bytes for each in step.layers), list[str](), [0]
    for each in step.layers:
        middle = sum(sizes) + each.trained_bytes / 2
        if sizes[0] and each.trained_bytes and middle >= total * len(sizes) / count and len(sizes) < count:
            names.append(each.name)
            sizes.append(0)
        sizes[-1] += each.trained_bytes
    return tuple(names), max(sizes) / max(1, total)


def _splits(step: Step, group: DeviceGroup) -> list[SplitLayer]:
    return [split for layer in step.layers for split in layer.splits if split.columns % group.count == 0]


def _shared_bytes(step: Step, group: DeviceGroup, choice: PlannedChoice) -> int:
    """Bytes of the weights that no replica has as a whole."""
    if choice.layout.sharding == WEIGHTS:
        return sum(each.trained_bytes for each in step.layers if each.num_shared is not None)
    return sum(each.num_bytes for each in _splits(step, group)) if choice.layout.sharding == SPLIT else 0


def exchange_seconds(step: Step, group: DeviceGroup, choice: PlannedChoice) -> float:
    """Estimates what devices send each other in a step, at the full rate of the links, one after the other."""
    speed, count = group.device.bytes_per_second(group.count), group.count
    if choice.stages or count == 1 or speed is None:
        return 0.0
    shared = _shared_bytes(step, group, choice)
    seconds = all_reduce_seconds(max(0, step.reduced_bytes - shared), group)
    if choice.layout.sharding == WEIGHTS:  # gathered for both passes and gradients scattered, for each microbatch
        seconds += choice.num_microbatches * 1.5 * all_reduce_seconds(shared, group)
    elif choice.layout.sharding == SPLIT:  # rows and columns, in both passes
        for each in _splits(step, group):
            sent = choice.rows * (each.input_bytes + each.output_bytes / count)
            seconds += choice.num_microbatches * 2 * (count - 1) * (2 * MESSAGE_SECONDS + sent / speed)
    return seconds


def _estimate_largest_rows(traced: TracedStep, group: DeviceGroup, choice: PlannedChoice, usable: float) -> int:
    """Estimates the most examples of a microbatch that fit; memory grows along a line."""

    def memory(rows: int) -> float:
        return estimate_memory(traced.estimate_step(rows), group, choice)

    slope = (memory(choice.rows + 1000) - memory(choice.rows)) / 1000
    return choice.rows + int((usable - memory(choice.rows)) / slope) if slope > 0 else choice.rows


def _estimate(
    training: PlannedTraining,
    group: DeviceGroup,
    choice: PlannedChoice,
    step: Step,
    largest_rows: int,
    measured: MeasuredRun | None,
) -> Estimate:
    number, device = choice.num_microbatches, group.device
    memory = estimate_memory(step, group, choice)
    flops, moved, of_memory, of_time = step.flops * number, step.bytes_moved * number, ESTIMATED, ESTIMATED
    compiled = training.compile_step(group, choice) if device.is_tpu else None
    if compiled is not None:
        (memory, flops, moved), of_memory, of_time = compiled, COMPILED, COMPILED
    compute, moving = flops / device.flops[choice.precision], moved / device.memory_bytes_per_second
    if choice.stages:  # the largest stage, which waits at the beginning and the end
        waits = (number + len(choice.stages)) / number
        compute, moving = (each * choice.largest_stage * waits for each in (compute, moving))
    reduce_seconds = exchange_seconds(step, group, choice)
    seconds = max(compute, moving) + reduce_seconds
    if measured is not None and measured.ran_on(group):
        speed = measured.result.examples_per_second
        assert speed is not None  # as `read_measured_run` has it
        seconds, of_time = training.global_batch_size / speed, f"measured in {measured.path}"
    interval, lost = plan_checkpoints(training.policy, seconds, training.steps_per_epoch)
    hours = training.total_steps * seconds * (1 + lost) / 3600
    return Estimate(
        group=group,
        strategy=training.strategy(group, is_staged=bool(choice.stages)),
        choice=choice,
        step=step,
        largest_rows=largest_rows,
        memory_bytes=memory,
        compute_seconds=compute,
        memory_seconds=moving,
        reduce_seconds=reduce_seconds,
        step_seconds=seconds,
        utilization=compute / seconds,
        interval_seconds=interval,
        lost_share=lost,
        hours=hours,
        price=None if group.usd_per_hour is None else hours * group.usd_per_hour,
        basis=(of_time, of_memory),
    )


def all_reduce_seconds(num_bytes: float, group: DeviceGroup) -> float:
    """Estimates an all-reduce as a ring (benchmarks/scaling.md), at the full rate of the links."""
    speed = group.device.bytes_per_second(group.count)
    return 2 * (group.count - 1) * (MESSAGE_SECONDS + num_bytes / group.count / speed) if speed else 0.0


def plan_checkpoints(
    policy: CheckpointPolicy | None, step_seconds: float = 0.0, steps_per_epoch: int | None = None
) -> tuple[float | None, float]:
    """Seconds between checkpoints, and the share of the time that is not spent on the training."""
    if policy is None:
        return None, 0.0
    failures = policy.mean_seconds_between_failures
    steps = [policy.every_steps, policy.every_epochs and steps_per_epoch and policy.every_epochs * steps_per_epoch]
    fixed = [policy.every_seconds, *(number and number * step_seconds for number in steps)]
    interval = min((seconds for seconds in fixed if seconds), default=None)
    if interval is None:
        schedule = CheckpointSchedule(CheckpointPolicy(mean_seconds_between_failures=failures), steps_per_epoch=None)
        schedule.record_save(1, 0.0, cost_seconds=FIRST_COST)
        interval = schedule.interval_seconds
        assert interval is not None
    return interval, FIRST_COST / interval + interval / 2 / failures
