"""How long a training takes on so many devices of a kind, and with which settings it fits there.

Invariant: a time is a roofline, the least that the makers' figures allow, unless a run has measured it; each estimate
says what it rests on. Memory, operations and bytes come from the traced step (`traced_step`) or from a TPU's compiler.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from tfdist.checkpoint.policy import FIRST_COST, CheckpointPolicy, CheckpointSchedule
from tfdist.errors import UserError
from tfdist.planning.traced_step import ALLOCATED, Step
from tfdist.telemetry.result import read_result
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tpu_compiler.devices import Device

USABLE = 0.9  # of a device's memory: an assumption; the driver, its libraries and workspaces of kernels need the rest
MESSAGE_SECONDS = 10e-6  # of a message, however small: the assumption of benchmarks/scaling.md
MOST_MICROBATCHES = 64
OPTIMIZER = "optimizer"
HOROVOD = "horovod"
ESTIMATED = "traced graph and the makers' figures"
COMPILED = "the TPU's compiler"
MEASURED = "measured in"


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
    def usd_per_hour(self) -> float | None:
        """The price of all devices; None where no price is known."""
        price = self.device.usd_per_hour
        return None if price is None else self.count * price


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """A finished run, whose measurements count.

    Attributes:
      examples_per_second: of its last start, evaluations and all else between steps included.
      accelerators: names of what it computed on; "CPU" where that was nothing else.
    """

    path: str
    examples_per_second: float
    num_replicas: int
    accelerators: Sequence[str]

    def ran_on(self, group: DeviceGroup) -> bool:
        """Returns whether the run was on so many of these devices."""
        names = [name for name in group.device.names if any(name in each for each in self.accelerators)]
        return bool(names) and self.num_replicas == group.count


def read_measured_run(path: str) -> MeasuredRun:
    """Reads throughput and hardware of a finished run; raises UserError if the directory has none."""
    directory = RunDirectory(path)
    result = read_result(directory)
    if result is None:
        raise UserError(f"--from_run={path} holds no finished run: there is no {directory.result}.")
    if not result.examples_per_second or not result.num_replicas:
        raise UserError(f"--from_run={path} holds no measurements: {directory.result} has no examples_per_second.")
    return MeasuredRun(
        path=directory.path,
        examples_per_second=result.examples_per_second,
        num_replicas=result.num_replicas,
        accelerators=list(result.hardware.get("accelerators") or ()) or ["CPU"],
    )


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """The step traced with two sizes of a microbatch; what another size needs lies on the line through both."""

    small: Step
    large: Step

    def estimate_step(self, rows: int) -> Step:
        """The step with so many rows in a microbatch."""
        if self.small.rows == self.large.rows:
            return self.small
        share = (rows - self.small.rows) / (self.large.rows - self.small.rows)

        def interpolate(low: float, high: float) -> float:
            return low + (high - low) * share

        return dataclasses.replace(
            self.small,
            rows=rows,
            tensor_bytes=int(interpolate(self.small.tensor_bytes, self.large.tensor_bytes)),
            batch_bytes=int(interpolate(self.small.batch_bytes, self.large.batch_bytes)),
            flops=interpolate(self.small.flops, self.large.flops),
            bytes_moved=interpolate(self.small.bytes_moved, self.large.bytes_moved),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """The training that is planned.

    Attributes:
      trace: the step by precision and whether blocks are computed again; None where that is not possible.
      precisions: that may be chosen.
      compile_step: memory, flops and bytes that a TPU's compiler tells of a step; None: there is none.
      policy: of its checkpoints.
      horovod: whether Horovod is to be used where several GPUs are.
    """

    global_batch_size: int
    total_steps: int
    precisions: tuple[str, ...]
    trace: Callable[[str, bool], TracedStep | None]
    compile_step: Callable[[DeviceGroup, PlannedChoice], tuple[float, float, float] | None]
    policy: CheckpointPolicy | None
    horovod: bool = False

    def strategy(self, group: DeviceGroup) -> str:
        """The name of the strategy's module."""
        if group.device.is_tpu:
            return "tpu"
        if group.count == 1:
            return "one_device"
        if self.horovod:
            return HOROVOD
        return "mirrored" if group.num_machines == 1 else "multi_worker"


@dataclasses.dataclass(frozen=True)
class PlannedChoice:
    """Settings that an estimate is of; `rows` are a microbatch's on one replica."""

    precision: str
    recomputes: bool
    sharding: str | None
    num_microbatches: int
    rows: int


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
            found = _first_that_fits(training, group, precision)
            if found is not None:
                yield _estimate(training, group, *found, measured)


def estimate_memory(step: Step, group: DeviceGroup, choice: PlannedChoice) -> float:
    """Bytes of one replica at the peak; several microbatches keep the sum of their gradients."""
    slots = step.slot_bytes / (group.count if choice.sharding else 1)
    state = step.parameter_bytes + slots + (step.gradient_bytes if choice.num_microbatches > 1 else 0)
    return state + ALLOCATED * step.tensor_bytes + 2 * step.batch_bytes


def _first_that_fits(
    training: PlannedTraining, group: DeviceGroup, precision: str
) -> tuple[PlannedChoice, Step, int] | None:
    """The first of: as it is, blocks computed again, the optimizer's state shared; each with ever more microbatches."""
    usable = USABLE * group.device.memory_bytes
    may_shard = group.count > 1 and not group.device.is_tpu
    for recomputes, sharding in [(False, None), (True, None), *([(True, OPTIMIZER)] if may_shard else [])]:
        traced = training.trace(precision, recomputes)
        if traced is None:
            continue
        for number in (2**power for power in range(MOST_MICROBATCHES.bit_length())):
            if training.global_batch_size < group.count * number:
                break
            if group.device.is_tpu and training.global_batch_size % (group.count * number):
                continue
            rows = math.ceil(training.global_batch_size / group.count / number)
            step = traced.estimate_step(rows)
            choice = PlannedChoice(precision, step.recomputes, sharding, number, rows)
            if estimate_memory(step, group, choice) <= usable:
                return choice, step, _estimate_largest_rows(traced, group, choice, usable)
    return None


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
        (memory, flops, moved), of_memory = compiled, COMPILED
        of_time = f"{COMPILED} and the makers' figures"
    compute, moving = flops / device.flops[choice.precision], moved / device.memory_bytes_per_second
    reduce_seconds = all_reduce_seconds(step.reduced_bytes, group)
    seconds = max(compute, moving) + reduce_seconds
    if measured is not None and measured.ran_on(group):
        seconds, of_time = training.global_batch_size / measured.examples_per_second, f"{MEASURED} {measured.path}"
    interval, lost = plan_checkpoints(training.policy)
    hours = training.total_steps * seconds * (1 + lost) / 3600
    return Estimate(
        group=group,
        strategy=training.strategy(group),
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
    count, speed = group.count, group.device.bytes_per_second(group.count)
    if count == 1 or speed is None:
        return 0.0
    return 2 * (count - 1) * (MESSAGE_SECONDS + num_bytes / count / speed)


def plan_checkpoints(policy: CheckpointPolicy | None) -> tuple[float | None, float]:
    """Seconds between checkpoints, and the share of the time that is not spent on the training."""
    if policy is None:
        return None, 0.0
    failures = policy.mean_seconds_between_failures
    schedule = CheckpointSchedule(CheckpointPolicy(mean_seconds_between_failures=failures), steps_per_epoch=None)
    schedule.record_save(1, 0.0, cost_seconds=FIRST_COST)
    interval = schedule.interval_seconds
    assert interval is not None
    return interval, FIRST_COST / interval + interval / 2 / failures
