"""A plan for people."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.planning.documents import ASSUMPTIONS, uncertain
from tfdist.planning.estimate import COMPILED, MEASURED, Estimate, Training
from tfdist.telemetry.console.formatting import in_bytes

MAX_FACTOR = 64  # of the batch, up to which a larger one is named
HEADERS = (
    "devices",
    "strategy",
    "precision",
    "microbatches",
    "largest",
    "memory",
    "step",
    "MFU",
    "hours",
    "USD",
    "time by",
    "memory by",
)


def text(best: Sequence[Estimate], training: Training) -> str:
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
        *_table([_row(each) for each in best]),
        "",
        f"plan: {first.group}, {first.strategy}, {choice.precision}, "
        f"{number} microbatch{'es' if number > 1 else ''} of {choice.rows} examples"
        + (", gradient checkpointing" if choice.recomputes else "")
        + (f", train.sharding = {choice.sharding!r}" if choice.sharding else ""),
        f"all-reduce {1e3 * first.reduce_seconds:.3g} ms beside {1e3 * first.compute_seconds:.3g} ms of products and "
        f"{1e3 * first.memory_seconds:.3g} ms of memory",
        f"the batch stays {training.global_batch_size}, and so does the learning rate"
        + _describe_larger(first, training),
    ]
    if training.policy is not None:
        lines.append(
            f"a checkpoint of {in_bytes(step.state_bytes)} every {first.interval_seconds:.0f} s, "
            f"{100 * first.lost_share:.2g} % of the time lost to checkpoints and repeated steps"
        )
    lines += [f"time: {first.basis[0]}; memory: {first.basis[1]}", *(f"assumed: {each}" for each in ASSUMPTIONS)]
    return "\n".join([*lines, *(f"uncertain: {each}" for each in uncertain(first))])


def _describe_larger(first: Estimate, training: Training) -> str:
    """Which batch would fit; nothing where it is so large that nobody would train with it."""
    largest = first.largest_rows * first.group.count
    factor = largest / training.global_batch_size
    if factor > MAX_FACTOR:
        return ""
    return f"; up to {largest} would fit, with a rate times {factor:.3g} (its root for Adam) and a warm-up"


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
        *map(_short, each.basis),
    )


def _short(basis: str) -> str:
    """What an estimate rests on, in a word."""
    return "run" if basis.startswith(MEASURED) else "compiler" if basis.startswith(COMPILED) else "graph"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    table = [HEADERS, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADERS))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
