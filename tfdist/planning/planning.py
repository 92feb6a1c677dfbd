"""`--mode=plan`: says what a training needs, where it fits, how long it takes and what it costs, before any is paid.

Nothing is trained and no accelerator is asked for. Writes plan.json and plan.gin into the run directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.errors import UserError, suggest
from tfdist.planning import documents
from tfdist.planning.estimate import (
    LAYOUTS,
    ON_ONE_DEVICE,
    DeviceGroup,
    Estimate,
    Layout,
    Limits,
    PlannedChoice,
    PlannedTraining,
    TracedStep,
    estimate_group,
    read_measured_run,
    read_tuning,
)
from tfdist.planning.requests import PlanRequest
from tfdist.planning.traced_step import Step, deepen, omit_values, trace_step
from tfdist.storage import files, lease
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.pipelined import Pipelined
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import remove_stale
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tpu_compiler.compiling import compile_programs
from tfdist.tpu_compiler.devices import Device, parse_slice, read_devices
from tfdist.tpu_compiler.toolchain import Compiler, is_installed, open_compiler
from tfdist.training.run.train_settings import TrainSettings

FLOAT32, BFLOAT16 = "float32", "bfloat16"
SMALLER = 8  # times: the smaller of the microbatches that are traced
MAX_LAYERS = 4  # blocks of a shipped model that are traced: with fewer, its peak of memory is at another time
NEXT_BEST = 3
COUNTS = (1, 2, 4, 8)  # devices that are looked at where no number is given


def plan(
    settings: TrainSettings,
    run_dir: str,
    notify: Callable[[str], None],
    *,
    devices: Sequence[str],
    prices: Sequence[str],
    hardware: str | None,
    limits: Limits,
    from_run: str | None,
    request: PlanRequest | None = None,
) -> None:
    """Prints a page, and writes plan.json and plan.gin; `devices` and so on are the mode's flags.

    Raises:
      UserError: something given is wrong, or nothing meets the limits.
    """
    if settings.canonical_replicas is not None:
        raise UserError(
            f"--mode=plan does not know train.deterministic = {settings.deterministic!r}. Plan without it: write "
            "train.deterministic=False after the files."
        )
    known = apply_prices(prices, read_devices(hardware))
    if request is not None:
        known, asked = request.choose_devices(known)
        devices = devices or asked
    wanted = parse_groups(devices, known)
    tuning = None if from_run is None else read_tuning(from_run)
    measured = None if from_run is None or tuning is not None else read_measured_run(from_run)
    directory = RunDirectory(run_dir)
    directory.create()
    with contextlib.ExitStack() as leaving:
        held = lease.acquire(directory.path, owner="--mode=plan", notify=notify, name=f"{lease.NAME}-plan")
        leaving.callback(held.release)
        remove_stale(directory.path, "plan")
        compiler = None
        if any(group.device.is_tpu for group in wanted) and is_installed():
            compiler = leaving.enter_context(open_compiler(notify))
        several = any(group.count > 1 for group in wanted)
        training = describe_training(settings, several=several, compiler=compiler, request=request)
        found: list[Estimate] = []
        for group in wanted:
            try:
                found += estimate_group(training, group, measured)
            except UserError as error:  # a TPU cannot run it, or has no room for it
                notify(f"{group} is left out. {error}")
        best = choose_plans(found, limits)
        # Two checkpoints are kept while one is being written.
        notes = [] if request is None else request.list_notes(3 * best[0].step.state_bytes)
        if measured is not None and not any(map(measured.ran_on, wanted)):
            notes.append(f"{measured.path} ran on other devices, or another number of them: its speed changes nothing.")
        facts: dict[str, Any] = {"measured": measured, "tuning": tuning, "notes": notes, "directory": directory}
        document = documents.build_document(best, training, limits, **facts)
        files.write_atomic(files.join(directory.path, "plan.json"), to_json(document, indent=2) + "\n")
        files.write_atomic(files.join(directory.path, "plan.gin"), documents.format_gin(best[0], settings))
        notify(documents.format_page(best, document["uncertain"]))
        notify(
            f"{files.join(directory.path, 'plan.json')}; to train so, write behind the experiment's files: "
            f"--gin_file={directory.path}/plan.gin\npipeline: {document['pipeline_config']['example']} of "
            "tfdist new pipelines --example=pipelines"
        )


def describe_training(
    settings: TrainSettings, *, several: bool, compiler: Compiler | None = None, request: PlanRequest | None = None
) -> PlannedTraining:
    """Describes the training that an experiment's settings define; its step is traced on demand.

    Args:
      several: whether several replicas are among what is planned.
      compiler: of TPUs; None: they are estimated as other devices are.
      request: asks for an approach, and for the depth of a shipped model.
    """
    depth = None if request is None else request.depth
    build: Any = settings.model
    smallest = 1 if depth is not None else max(1, settings.global_batch_size // SMALLER)
    sizes = sorted({smallest, settings.global_batch_size})

    @functools.cache
    def trace(precision: str, recomputes: bool) -> TracedStep | None:
        """Traces the step with two sizes of a microbatch; None where no layer can be recomputed."""
        recompute = settings.recompute or ("auto" if recomputes else None)
        if recomputes and settings.recompute is not None:
            return trace(precision, False)  # which does so already

        def trace_rows(rows: int, num_layers: int | None = depth) -> Step:
            if num_layers is not None and num_layers > MAX_LAYERS:
                return deepen(trace_rows(rows, MAX_LAYERS - 1), trace_rows(rows, MAX_LAYERS), num_layers)
            model: Any = settings.model if num_layers is None else lambda: build(num_layers=num_layers)
            with omit_values():
                return trace_step(
                    dataclasses.replace(settings, model=model),
                    rows=rows,
                    num_replicas=2 if several else 1,
                    precision=precision,
                    recompute=recompute,
                )

        try:
            return TracedStep(trace_rows(sizes[0]), trace_rows(sizes[-1]))
        except UserError:
            if recomputes:  # no layer holds layers of its own
                return None
            raise

    def compile_step(group: DeviceGroup, choice: PlannedChoice) -> tuple[float, float, float] | None:
        """Returns bytes of memory, flops and bytes accessed by the TPU's compiler; None where there is none for it."""
        topology = find_topology(group)
        if compiler is None or topology is None:
            return None
        own = dataclasses.replace(
            settings,
            precision=choice.precision,
            num_microbatches=choice.num_microbatches,
            recompute=settings.recompute or ("auto" if choice.layout.recomputes else None),
            eval_data=None,
            callbacks=(),
        )
        (found,) = compile_programs(own, parse_slice(topology), compiler)
        return found.memory_bytes, found.flops, found.bytes_accessed

    def allow(layout: Layout) -> bool:
        """Returns whether train.sharding and the strategy go with the other settings."""
        strategy = Pipelined(["a_layer"]) if layout.is_staged else OneDevice()
        try:
            dataclasses.replace(settings, sharding=layout.setting, strategy=strategy)
        except UserError:
            return False
        return True

    approach = None if request is None else request.approach
    names = LAYOUTS if approach is None else () if approach == ON_ONE_DEVICE else (approach,)
    precisions = dict.fromkeys([settings.precision, *([BFLOAT16] if settings.precision == FLOAT32 else [])])
    examples = trace(settings.precision, False)
    assert examples is not None
    steps_per_epoch = settings.plan(examples.small.num_examples, 1).steps_per_epoch
    return PlannedTraining(
        global_batch_size=settings.global_batch_size,
        total_steps=settings.boundaries(steps_per_epoch).total_steps,
        precisions=tuple(precisions),
        trace=trace,
        compile_step=compile_step,
        policy=settings.policy,
        horovod=isinstance(settings.strategy, Horovod),
        steps_per_epoch=steps_per_epoch,
        layouts=[layout for name in names for layout in LAYOUTS[name] if allow(layout)],
        rate=examples.small.rate,
        dashboard=next((url for sink in settings.sinks if (url := sink.dashboard_url)), None),
    )


def choose_plans(found: Sequence[Estimate], limits: Limits) -> list[Estimate]:
    """The plan and the next best, one of each group of devices.

    Raises:
      UserError: nothing fits, or nothing meets the limits; with the nearest that there is.
    """
    if not found:
        raise UserError(
            "The training fits on none of these devices, or its batch cannot be split among them, or --hardware "
            "gives them no network_bytes_per_second. Name larger ones or more of them by --devices, or write a smaller "
            "train.global_batch_size."
        )
    if limits.budget_usd is not None and all(each.price is None for each in found):
        raise UserError("--budget_usd needs to know what these devices cost. Write, for example, --prices=a100_40=3.67")
    allowed = sorted(filter(limits.allow, found), key=_cost)
    if not allowed:
        cheapest, quickest = min(found, key=_cost), min(found, key=lambda each: each.hours)
        raise UserError(
            f"No plan meets {limits}. The cheapest is {cheapest}, the quickest {quickest}. Write limits that allow one "
            "of these, or more devices."
        )
    best = {str(each.group): each for each in reversed(allowed)}
    return sorted(best.values(), key=_cost)[: 1 + NEXT_BEST]


def _cost(each: Estimate) -> tuple[float, float]:
    """Cheaper first, then quicker; those whose price nobody knows come last, by hours of devices."""
    return (each.price, each.hours) if each.price is not None else (float("inf"), each.device_hours)


def find_topology(group: DeviceGroup) -> str | None:
    """The slice of so many chips, as near to a square or cube as can be; None where they are no power of two."""
    power = group.count.bit_length() - 1
    if group.count != 1 << power:
        return None
    num_axes = group.device.num_axes
    sizes = sorted(1 << (power // num_axes + (axis < power % num_axes)) for axis in range(num_axes))
    ordered = sizes if num_axes == 2 else sizes[::-1]
    assert math.prod(ordered) == group.count
    return f"{group.device.kind}:{'x'.join(map(str, ordered))}"


def parse_groups(texts: Sequence[str], known: Mapping[str, Device]) -> list[DeviceGroup]:
    """Returns the groups that `--devices` names, 'a100_40:8' or 'v5e' for several numbers of it; all by default."""
    found = []
    for text in [part for given in texts for part in given.split(",")] or list(known):
        kind, _, number = text.partition(":")
        if kind not in known:
            raise UserError(f"--devices={text} names none of {', '.join(known)}.{suggest(kind, known)}")
        if number and not (number.isdecimal() and int(number)):
            raise UserError(f"--devices={text}: {number!r} is no number of devices. Write, for example, {kind}:8")
        counts = [int(number)] if number else [count for count in COUNTS if count <= known[kind].per_machine]
        found += [DeviceGroup(known[kind], count) for count in counts]
    return found


def apply_prices(texts: Sequence[str], known: Mapping[str, Device]) -> dict[str, Device]:
    """The devices with what `--prices` says that one costs for an hour, in US dollars: 'a100_40=3.67'."""
    found = dict(known)
    for text in [part for given in texts for part in given.split(",")]:
        kind, _, amount = text.partition("=")
        if kind not in known:
            raise UserError(f"--prices={text} names none of {', '.join(known)}.{suggest(kind, known)}")
        if not re.fullmatch(r"\d+(\.\d*)?", amount):
            raise UserError(f"--prices={text}: {amount!r} is no price. Write dollars for an hour of one, {kind}=1.20")
        found[kind] = dataclasses.replace(known[kind], usd_per_hour=float(amount))
    return found
