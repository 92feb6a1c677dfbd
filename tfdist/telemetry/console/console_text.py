"""Words and figures for people: lines for an epoch and for the way through it, sizes, durations, values, curves.

Invariant: pure functions of numbers and names, without control characters, whatever a user's choice holds; columns stay
where they are from line to line. Consoles, pages and sweeps share them; the training loop fills the dataclasses.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_GIN_REFERENCE = re.compile(r"[@%][\w./]+(\(\))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The length of a run; None where it is not known."""

    total_epochs: int | None = None
    steps_per_epoch: int | None = None
    total_steps: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Position of a run. Epochs count from 1, as `step_in_epoch` does; metrics are numbers in the order shown."""

    step: int
    epoch: int
    step_in_epoch: int
    metrics: Mapping[str, Any]
    examples_per_second: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochSummary:
    """The results of an epoch; `eval_metrics` is empty where nothing was evaluated, `seconds` are the epoch's.

    `examples_per_second` is None where this process made no step of it: it resumed at its end.
    """

    step: int
    epoch: int
    metrics: Mapping[str, Any]
    seconds: float
    examples_per_second: float | None
    eval_metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def plan_text(plan: TrainingPlan) -> str:
    """`training: 10 epochs, 23 steps an epoch, 230 steps in all`."""
    parts = []
    if plan.total_epochs is not None:
        parts.append(f"{plan.total_epochs:,} {'epoch' if plan.total_epochs == 1 else 'epochs'}")
    if plan.steps_per_epoch is not None:
        parts.append(f"{plan.steps_per_epoch:,} steps an epoch")
    if plan.total_steps is not None:
        parts.append(f"{plan.total_steps:,} steps in all")
    return "training: " + (", ".join(parts) or "until stopped")


def epoch_text(plan: TrainingPlan, epoch: int) -> str:
    """`epoch  3/10`."""
    if plan.total_epochs is None:
        return f"epoch {epoch}"
    total = str(plan.total_epochs)
    return f"epoch {epoch:>{len(total)}}/{total}"


def epoch_line(plan: TrainingPlan, summary: EpochSummary) -> str:
    """`epoch  3/10  step  68  loss 0.1234  accuracy 0.9671 | eval loss 0.1300 | 1.2 s  12,345 examples/s`."""
    step = f"  step {summary.step:>{len(str(plan.total_steps or summary.step))}}"
    metrics, evaluation = _numbers_text(summary.metrics), _numbers_text(summary.eval_metrics)
    evaluated = f" | eval {evaluation.lstrip()}" if evaluation else ""
    rate = summary.examples_per_second
    took = f" | {summary.seconds:.1f} s" + ("" if rate is None else f"  {rate_text(rate, None)}")
    return f"{epoch_text(plan, summary.epoch)}{step}{metrics}{evaluated}{took}"


def progress_line(plan: TrainingPlan, progress: Progress, seconds_left: float | None) -> str:
    """`epoch  3/10  step 40/68  loss 0.1234  12,345 examples/s  0:00:12 left`."""
    steps = "" if plan.steps_per_epoch is None else f"/{plan.steps_per_epoch}"
    position = f"{epoch_text(plan, progress.epoch)}  step {progress.step_in_epoch}{steps}"
    rate = rate_text(progress.examples_per_second, seconds_left)
    return f"{position}{_numbers_text(progress.metrics)}  {rate}"


def _numbers_text(metrics: Mapping[str, Any]) -> str:
    """`  loss 0.1234` for each number among the metrics."""
    numbers = {n: v for n, v in metrics.items() if not isinstance(v, list | tuple) and not getattr(v, "shape", ())}
    return "".join(f"  {name} {number_text(float(value))}" for name, value in numbers.items())


def number_text(number: float) -> str:
    """Formats a number with four decimals where they tell something, else with three and an exponent."""
    if not math.isfinite(number) or number == 0 or 1e-3 <= abs(number) < 1e5:
        return f"{number:.4f}"
    return f"{number:.3e}"


def rate_text(examples_per_second: float, seconds_left: float | None) -> str:
    """`12,345 examples/s  0:00:12 left`."""
    rate = f"{examples_per_second:,.0f} examples/s"
    return rate if seconds_left is None else f"{rate}  {duration_text(seconds_left)} left"


UNITS = ("KiB", "MiB", "GiB", "TiB")


def in_bytes(count: float) -> str:
    """ "1.5 KiB", "64 MiB": to a tenth of the largest unit that there is one of."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in UNITS:
        count /= 1024
        if count < 1024 or unit == UNITS[-1]:
            break
    return f"{count:.1f}".removesuffix(".0") + f" {unit}"


def align_columns(rows: Sequence[Sequence[str]], right: Collection[str]) -> str:
    """Formats rows under the names of their columns, which are the first row; those in `right` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [list(zip(rows[0], row, widths, strict=True)) for row in rows]
    padded = [[text.rjust(n) if name in right else text.ljust(n) for name, text, n in row] for row in cells]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def short_names(paths: Sequence[str], separator: str = ".") -> dict[str, str]:
    """Returns for each path the shortest end of it, in whole parts, that no other of them shares."""
    names = {}
    for path in paths:
        parts = path.split(separator)
        endings = [separator.join(["", *parts[-count:]]) for count in range(1, len(parts) + 1)]
        alone = (end[1:] for end in endings if sum((separator + other).endswith(end) for other in paths) == 1)
        names[path] = next(alone, path)
    return names


def value_text(value: Any, *, most: int | None = None) -> str:
    """A parameter's value: a long float to five digits, text without quotes, the rest as Python has it; cut to `most`.

    Of a reference such as `@keras.optimizers.Adam()` the last component is left: `@Adam()`.
    """
    if isinstance(value, float):
        text = repr(float(value))  # as it was typed, where somebody has typed it
        return text if len(text) <= 10 else f"{value:.5g}"
    text = value if isinstance(value, str) else repr(value)
    if _GIN_REFERENCE.fullmatch(text):
        text = text[0] + re.split(r"[./]", text[1:])[-1]
    text = "".join(sign if sign.isprintable() else " " for sign in text)
    if most is None or len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"  # the ends tell things apart


def values_text(values: Mapping[str, Any]) -> str:
    """`learning_rate 0.001  layers 3`."""
    names = short_names(list(values))
    return "  ".join(f"{names[path]} {value_text(value, most=24)}" for path, value in values.items())


def count_text(count: int, noun: str) -> str:
    """`1 trial`, `2,000 trials`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration_text(seconds: float) -> str:
    """`0:12:05`: hours, minutes, seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
