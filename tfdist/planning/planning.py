"""`--mode=plan`: says what a training needs, where it fits, how long it takes and what it costs, before any is paid.

Nothing is trained and no accelerator is asked for. Writes plan.json and plan.gin into the run directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from tfdist.errors import UserError
from tfdist.planning import documents, page
from tfdist.planning.choosing import Limits, chosen
from tfdist.planning.estimate import OPTIMIZER, Choice, Estimate, Traced, Training, estimates
from tfdist.planning.hardware import Group, devices, groups, priced
from tfdist.planning.measured import read
from tfdist.planning.traced_step import Step, step_of
from tfdist.storage import files, lease
from tfdist.strategies.horovod import Horovod
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import remove_stale
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tpu_compiler.chips import slice_of
from tfdist.tpu_compiler.compiling import compile_programs
from tfdist.tpu_compiler.toolchain import Compiler, is_installed, open_compiler
from tfdist.training.run.settings import TrainSettings

FLOAT32, BFLOAT16 = "float32", "bfloat16"
SMALLER = 8  # times: the smaller of the microbatches that are traced


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of the mode, as the user gives them."""

    devices: Sequence[str] = ()
    prices: Sequence[str] = ()
    spot_hours: float | None = None
    hardware: str | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    from_run: str | None = None


def plan(settings: TrainSettings, options: Options, run_dir: str, tell: Callable[[str], None]) -> list[Estimate]:
    """Prints a page, and writes plan.json and plan.gin.

    Returns:
      The plan, and the next best.

    Raises:
      UserError: something given is wrong, or nothing meets the limits.
    """
    _check(settings)
    wanted = groups(options.devices, priced(options.prices, devices(options.hardware)))
    if options.spot_hours is not None:
        spot = [dataclasses.replace(each, is_spot=True) for each in wanted if each.device.spot_usd_per_hour is not None]
        if not spot or settings.policy is None:
            lacks = (
                "train.checkpoint is 'off'" if spot else "none of the devices has one, such as --prices=l4=0.56/0.22"
            )
            raise UserError(
                f"--spot_hours={options.spot_hours:g} plans for spot machines, which need a price and checkpoints: "
                f"{lacks}."
            )
        wanted += spot
    measured = None if options.from_run is None else read(options.from_run)
    directory = RunDirectory(run_dir)
    directory.create()
    with contextlib.ExitStack() as leaving:
        held = lease.acquire(directory.path, owner="--mode=plan", notify=tell, name=f"{lease.NAME}-plan")
        leaving.callback(held.release)
        remove_stale(directory.path, "plan")
        compiler = None
        if any(group.device.is_tpu for group in wanted) and is_installed():
            compiler = leaving.enter_context(open_compiler(tell))
        training = training_of(
            settings,
            several=any(group.count > 1 for group in wanted),
            compiler=compiler,
            spot_hours=options.spot_hours,
        )
        found: list[Estimate] = []
        for group in wanted:
            try:
                found += estimates(training, group, measured)
            except UserError as error:  # a TPU cannot run it, or has no room for it
                tell(f"{group} is left out. {error}")
        best = chosen(found, options.limits)
        document = documents.document(best, training, options.limits, measured)
        files.write_atomic(files.join(directory.path, "plan.json"), to_json(document, indent=2) + "\n")
        files.write_atomic(files.join(directory.path, "plan.gin"), documents.gin(best[0], settings))
        tell(page.text(best, training))
        tell(
            f"{files.join(directory.path, 'plan.json')}; to train so, write behind the experiment's files: "
            f"--gin_file={directory.path}/plan.gin"
        )
    return best


def _check(settings: TrainSettings) -> None:
    """Raises UserError where the training is spread in a way that no estimate knows."""
    spread = {
        "train.sharding": settings.sharding not in (None, OPTIMIZER),
        "train.deterministic": settings.canonical_replicas is not None,
        "train.strategy": bool(settings.strategy.stages),
    }
    for name, is_so in spread.items():
        if is_so:
            raise UserError(
                f"--mode=plan does not know {name} = {getattr(settings, name.partition('.')[2])!r}. Plan without it: "
                f"write --gin_param='{name} = …' with a plain value after the files."
            )


def training_of(
    settings: TrainSettings, *, several: bool, compiler: Compiler | None = None, spot_hours: float | None = None
) -> Training:
    """What a plan has to know of an experiment; its step is traced as it is asked for.

    Args:
      several: whether several replicas are among what is planned.
      compiler: of TPUs; None: they are estimated as other devices are.
      spot_hours: after how many a spot machine is taken away, on the average.
    """
    sizes = sorted({max(1, settings.global_batch_size // SMALLER), settings.global_batch_size})

    @functools.cache
    def traced(precision: str, recomputes: bool) -> Traced | None:
        recompute = settings.recompute or ("auto" if recomputes else None)
        if recomputes and settings.recompute is not None:
            return traced(precision, False)  # which does so already

        def at(rows: int) -> Step:
            num_replicas = 2 if several else 1
            return step_of(settings, rows=rows, num_replicas=num_replicas, precision=precision, recompute=recompute)

        try:
            return Traced(at(sizes[0]), at(sizes[-1]))
        except UserError:
            if recomputes:  # no layer holds layers of its own
                return None
            raise

    def compiled(group: Group, choice: Choice) -> tuple[float, float, float] | None:
        topology = topology_of(group)
        if compiler is None or topology is None:
            return None
        own = dataclasses.replace(
            settings,
            precision=choice.precision,
            num_microbatches=choice.num_microbatches,
            recompute=settings.recompute or ("auto" if choice.recomputes else None),
            eval_data=None,
            callbacks=(),
        )
        (found,) = compile_programs(own, slice_of(topology), compiler)
        return found.memory_bytes, found.flops, found.bytes_accessed

    precisions = dict.fromkeys([settings.precision, *([BFLOAT16] if settings.precision == FLOAT32 else [])])
    examples = traced(settings.precision, False)
    assert examples is not None
    steps_per_epoch = settings.plan(examples.small.num_examples, 1).steps_per_epoch
    return Training(
        global_batch_size=settings.global_batch_size,
        total_steps=settings.boundaries(steps_per_epoch).total_steps,
        precisions=tuple(precisions),
        traced=traced,
        compiled=compiled,
        policy=settings.policy,
        horovod=isinstance(settings.strategy, Horovod),
        spot_hours=spot_hours,
    )


def topology_of(group: Group) -> str | None:
    """The slice of so many chips, as near to a square or cube as can be; None where they are no power of two."""
    power = group.count.bit_length() - 1
    if group.count != 1 << power:
        return None
    num_axes = 3 if group.device.kind in ("v4", "v5p") else 2
    sizes = sorted(1 << (power // num_axes + (axis < power % num_axes)) for axis in range(num_axes))
    ordered = sizes if num_axes == 2 else sizes[::-1]
    assert math.prod(ordered) == group.count
    return f"{group.device.kind}:{'x'.join(map(str, ordered))}"
