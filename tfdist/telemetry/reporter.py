"""What the training loop reports, told to everyone who listens: the console, metrics.jsonl, TensorBoard, the events."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.telemetry.console.console import Console
from tfdist.telemetry.console.console_text import EpochSummary, Progress
from tfdist.telemetry.events import EventLog
from tfdist.telemetry.metrics import Metrics

SHOWN_VARIABLES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reporter:
    """Passes on what the loop says; rates come as steps a second and go out as examples a second.

    `waited` is training's `Waited`, and `times` are its `WorkerTimes`, of which this room knows nothing.
    """

    console: Console
    metrics: Metrics
    events: EventLog
    examples_per_step: float

    def progress(self, *, step: int, epoch: int, step_in_epoch: int, metrics: Mapping[str, Any], rate: float) -> None:
        """Shows how far the run has come."""
        self.console.update(
            Progress(
                step=step,
                epoch=epoch + 1,
                step_in_epoch=step_in_epoch,
                metrics=metrics,
                examples_per_second=rate * self.examples_per_step,
            )
        )

    def point(self, *, step: int, epoch: int, split: str, metrics: Mapping[str, Any], learning_rate: float) -> None:
        """Logs the metrics of a step."""
        self.metrics.log(step=step, epoch=epoch + 1, split=split, metrics=metrics, learning_rate=learning_rate)

    def epoch_end(
        self,
        *,
        step: int,
        epoch: int,
        train: Mapping[str, Any],
        evaluation: Mapping[str, Any],
        seconds: float,
        rate: float | None,
    ) -> None:
        """Shows an epoch that has ended and was evaluated."""
        self.console.end_epoch(
            EpochSummary(
                step=step,
                epoch=epoch + 1,
                metrics=train,
                eval_metrics=evaluation,
                seconds=seconds,
                examples_per_second=None if rate is None else rate * self.examples_per_step,
            )
        )

    def report_overflow(self, *, step: int, steps: int, scale: float) -> None:
        """Warns of float16 gradients that overflowed."""
        self.events.warning("gradient_overflow", step=step, steps=steps, loss_scale=scale)

    def report_zero_weight(self, *, step: int) -> None:
        """Warns of a batch whose examples have no weight."""
        self.events.warning(
            "weightless_step",
            step=step,
            message=f"Up to step {step} there was a batch whose examples weigh nothing in all (sample weights, class "
            "weights or a mask are 0). Such a step changes nothing; how many there were is said at the end.",
        )

    def report_unused(self, *, step: int, variables: list[str]) -> None:
        """Warns of variables that the loss does not depend on."""
        shown = ", ".join(variables[:SHOWN_VARIABLES]) + (", …" if len(variables) > SHOWN_VARIABLES else "")
        self.events.warning(
            "variables_unused",
            step=step,
            message=f"The loss does not depend on {len(variables)} trainable variables; they stay as they are: {shown}",
            variables=variables,
        )

    def input_wait(self, *, step: int, epoch: int, waited: Any) -> None:
        """Logs how long workers waited for input in an epoch."""
        text = f"epoch {epoch + 1}: {_format_wait(waited)}" if waited.is_notable else None
        self.events.info("input_wait", step=step, message=text, epoch=epoch + 1, **_figures(waited))

    def input_bound(self, *, step: int, waited: Any, hint: str) -> None:
        """Warns that training waits for its input."""
        message = f"Training: {_format_wait(waited)}. {hint}".strip()
        self.events.warning("input_bound", step=step, message=message, **_figures(waited))

    def straggler(self, *, step: int, worker: int, seconds: float, median: float) -> None:
        """Warns of a worker that holds up the others."""
        self.events.warning(
            "straggler",
            step=step,
            message=f"worker {worker} holds up the others: a step takes it {_milliseconds(seconds)}, where the median "
            f"is {_milliseconds(median)}. Look at what else runs on its machine, its clock speed and its input.",
            slow_worker=worker,
            step_seconds=seconds,
            median_seconds=median,
        )

    def report_rounding(self, *, step: int, workers: Sequence[int]) -> None:
        """Warns of workers whose weights differ in their last digits."""
        who = ", ".join(map(str, workers))
        self.events.warning(
            "workers_round_differently",
            step=step,
            message=f"Worker {who} rounds otherwise than the others, as another kind of processor does, or "
            "TensorFlow's optimizer of graphs: its weights differ in their last digits. With train.deterministic = "
            "True, workers of one kind give the same bits.",
            workers=list(workers),
        )

    def workers(self, *, step: int, times: Sequence[Any]) -> None:
        """Logs the times of all workers at the end."""
        rows = [
            f"  worker {worker}: {_milliseconds(each.step_seconds)} a step of its own; of its time "
            f"{each.input_share:.0%} waiting for input, {each.idle_share:.0%} for other workers"
            for worker, each in enumerate(times)
        ]
        self.events.info(
            "workers",
            step=step,
            message="\n".join(["the workers:", *rows]),
            step_seconds=[each.step_seconds for each in times],
            input_share=[each.input_share for each in times],
            idle_share=[each.idle_share for each in times],
        )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _format_wait(waited: Any) -> str:
    who = f"worker {waited.worst} " if len(waited.seconds) > 1 else ""
    return f"{who}waited for input {waited.share:.0%} of the time ({waited.seconds[waited.worst]:.1f} s)"


def _figures(waited: Any) -> dict[str, Any]:
    several = {"by_worker": waited.by_worker} if len(waited.seconds) > 1 else {}
    return {"share": waited.share, "seconds": waited.seconds[waited.worst], **several}
