"""Words and figures of the console: the lines for an epoch and for the way through it.

Invariant: pure functions of numbers, one line each, without control characters; columns stay where they are from line
to line. The plain console and the progress bar share them, and the training loop fills the dataclasses.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np


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


def step_text(plan: Plan, step_in_epoch: int) -> str:
    """`40/68`."""
    return f"{step_in_epoch}" if plan.steps_per_epoch is None else f"{step_in_epoch}/{plan.steps_per_epoch}"


def epoch_line(plan: Plan, summary: EpochSummary, *, width: int | None = None) -> str:
    """`epoch  3/10  step  68  loss 0.1234  accuracy 0.9671 | eval loss 0.1300 | 1.2 s  12,345 examples/s`.

    Beyond `width` columns the rate, the seconds, the step and then metrics from the back are left out.
    """
    return _fitting(_shorter_epoch_lines(plan, summary), width)


def _shorter_epoch_lines(plan: Plan, summary: EpochSummary) -> Iterator[str]:
    epoch = epoch_text(plan, summary.epoch)
    step = f"step {summary.step:>{len(str(plan.total_steps or summary.step))}}"
    train, evaluation = _number_texts(summary.metrics), _number_texts(summary.eval_metrics)
    seconds, rate = f"{summary.seconds:.1f} s", summary.examples_per_second
    for speed in ([seconds, *([] if rate is None else [rate_text(rate, None)])], [seconds], []):
        yield _epoch_line([epoch, step, *train], evaluation, speed)
    for most in range(max(len(train), len(evaluation)), 0, -1):
        yield _epoch_line([epoch, *train[:most]], evaluation[: most + 1], [])
        yield _epoch_line([epoch, *train[:most]], evaluation[:most], [])
    yield _epoch_line([epoch, *train[:1]], [], [])
    yield epoch


def _epoch_line(train: Sequence[str], evaluation: Sequence[str], speed: Sequence[str]) -> str:
    named = [f"eval {evaluation[0]}", *evaluation[1:]] if evaluation else []
    return " | ".join("  ".join(part) for part in (train, named, speed) if part)


def progress_line(plan: Plan, progress: Progress, seconds_left: float | None, *, width: int | None = None) -> str:
    """`epoch  3/10  step 40/68  loss 0.1234  12,345 examples/s  0:00:12 left`, or the most of it that `width` holds."""
    place = [epoch_text(plan, progress.epoch), f"step {step_text(plan, progress.step_in_epoch)}"]
    return _fitting(_shorter_progress(place, progress, seconds_left, most=None), width)


def bar_text(plan: Plan, progress: Progress, seconds_left: float | None, *, width: int) -> str:
    """`40/68  loss 0.1234  accuracy 0.9671  12,345 examples/s  0:00:12 left`, or the most of it that `width` holds."""
    place = [step_text(plan, progress.step_in_epoch)]
    return _fitting([*_shorter_progress(place, progress, seconds_left, most=3), ""], width)


def _shorter_progress(
    place: Sequence[str], progress: Progress, seconds_left: float | None, *, most: int | None
) -> Iterator[str]:
    """Leaves metrics out from the back, then the rate, then the last metric."""
    numbers = _number_texts(progress.metrics)[:most]
    rate = rate_text(progress.examples_per_second, seconds_left)
    for count in range(len(numbers), min(len(numbers), 1) - 1, -1):
        yield "  ".join([*place, *numbers[:count], rate])
    yield "  ".join([*place, *numbers[:1]])
    yield "  ".join(place)


def _fitting(texts: Iterable[str], width: int | None) -> str:
    """The first that is no longer than `width`, else the last: no word and no number is cut."""
    text = ""
    for text in texts:
        if width is None or len(text) <= width:
            break
    return text


def _number_texts(metrics: Mapping[str, Any]) -> list[str]:
    """`loss 0.1234` for each number among the metrics."""
    return [f"{name} {number_text(float(value))}" for name, value in metrics.items() if np.ndim(value) == 0]


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
