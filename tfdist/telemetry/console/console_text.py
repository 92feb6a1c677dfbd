"""Words and figures of the console: the lines for an epoch and for the way through it.

Invariant: pure functions of numbers, one line each, without control characters; columns stay where they are from line
to line. The plain console and the progress bar share them, and the training loop fills the dataclasses.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How far a run is to go; None where nobody knows."""

    total_epochs: int | None = None
    steps_per_epoch: int | None = None
    total_steps: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is. Epochs count from 1, as `step_in_epoch` does; metrics are numbers in the order to show them."""

    step: int
    epoch: int
    step_in_epoch: int
    metrics: Mapping[str, Any]
    examples_per_second: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochSummary:
    """How an epoch ended; `eval_metrics` is empty where nothing was evaluated, `seconds` are the epoch's.

    `examples_per_second` is None where this process made no step of it: it resumed at its end.
    """

    step: int
    epoch: int
    metrics: Mapping[str, Any]
    seconds: float
    examples_per_second: float | None
    eval_metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class TimeLeft:
    """Estimates from the steps done since the first report, start-up and compilation before it apart."""

    def __init__(self, total_steps: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_steps = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def seconds(self, step: int) -> float | None:
        """Seconds to the end of the run, once two reports have told the speed."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        if self._total_steps is None or step <= first_step:
            return None
        return (now - first_time) / (step - first_step) * max(self._total_steps - step, 0)


def plan_text(plan: Plan) -> str:
    """`training: 10 epochs, 23 steps an epoch, 230 steps in all`."""
    parts = []
    if plan.total_epochs is not None:
        parts.append(f"{plan.total_epochs:,} {'epoch' if plan.total_epochs == 1 else 'epochs'}")
    if plan.steps_per_epoch is not None:
        parts.append(f"{plan.steps_per_epoch:,} steps an epoch")
    if plan.total_steps is not None:
        parts.append(f"{plan.total_steps:,} steps in all")
    return "training: " + (", ".join(parts) or "until stopped")


def epoch_text(plan: Plan, epoch: int) -> str:
    """`epoch  3/10`."""
    if plan.total_epochs is None:
        return f"epoch {epoch}"
    total = str(plan.total_epochs)
    return f"epoch {epoch:>{len(total)}}/{total}"


def epoch_line(plan: Plan, summary: EpochSummary, *, width: int | None = None) -> str:
    """`epoch  3/10  step  68  loss 0.1234  accuracy 0.9671 | eval loss 0.1300 | 1.2 s  12,345 examples/s`.

    Beyond `width` columns the rate, the seconds, the step and then metrics from the back are left out.
    """
    epoch = epoch_text(plan, summary.epoch)
    step = f"  step {summary.step:>{len(str(plan.total_steps or summary.step))}}"
    metrics, evaluation = _number_texts(summary.metrics), _number_texts(summary.eval_metrics)
    if evaluation:
        metrics += [f" | eval {evaluation[0].lstrip()}", *evaluation[1:]]
    rate = summary.examples_per_second
    took = [f" | {summary.seconds:.1f} s", "" if rate is None else f"  {rate_text(rate, None)}"]
    lines = [[epoch, step, *metrics, *took[:count]] for count in (2, 1, 0)]
    return _choose(lines + [[epoch, *metrics[:count]] for count in range(len(metrics), -1, -1)], width)


def progress_line(plan: Plan, progress: Progress, seconds_left: float | None, *, width: int | None = None) -> str:
    """`epoch  3/10  step 40/68  loss 0.1234  12,345 examples/s  0:00:12 left`, or the most of it that `width` holds."""
    steps = "" if plan.steps_per_epoch is None else f"/{plan.steps_per_epoch}"
    place = f"{epoch_text(plan, progress.epoch)}  step {progress.step_in_epoch}{steps}"
    rate, metrics = f"  {rate_text(progress.examples_per_second, seconds_left)}", _number_texts(progress.metrics)
    return _choose([[place, *metrics, rate], [place, *metrics[:1], rate], [place, *metrics[:1]], [place]], width)


def _choose(lines: list[list[str]], width: int | None) -> str:
    """The first of the lines that is not longer than `width`, or the last: no word and no number is cut."""
    texts = ["".join(parts) for parts in lines]
    return next((text for text in texts if width is None or len(text) <= width), texts[-1])


def _number_texts(metrics: Mapping[str, Any]) -> list[str]:
    """`  loss 0.1234` for each number among the metrics."""
    numbers = {n: v for n, v in metrics.items() if not isinstance(v, list | tuple) and not getattr(v, "shape", ())}
    return [f"  {name} {number_text(float(value))}" for name, value in numbers.items()]


def number_text(number: float) -> str:
    """Four decimals where they tell something, else three and an exponent."""
    if not math.isfinite(number) or number == 0 or 1e-3 <= abs(number) < 1e5:
        return f"{number:.4f}"
    return f"{number:.3e}"


def rate_text(examples_per_second: float, seconds_left: float | None) -> str:
    """`12,345 examples/s  0:00:12 left`."""
    rate = f"{examples_per_second:,.0f} examples/s"
    if seconds_left is None:
        return rate
    minutes, seconds = divmod(round(seconds_left), 60)
    return f"{rate}  {minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"
