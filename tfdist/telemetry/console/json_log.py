"""The console as a structured log: one JSON object a line, for collectors of logs.

Invariant: every line has time, level (INFO, WARN, ERROR, FATAL), job_id, worker, event, epoch, step, loss,
gpu_memory_used and message, null where it says nothing. All goes to standard output; of epochs and progress there is a
line each, at most one in ten seconds within an epoch. `--log=json` takes it in place of the console.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tfdist.telemetry.account.sampler import device_memory_bytes
from tfdist.telemetry.console.console import PROGRESS_LINE_SECONDS, Console, outliving_terminal
from tfdist.telemetry.console.console_text import EpochSummary, Progress, TrainingPlan
from tfdist.telemetry.events import time_text
from tfdist.telemetry.facts import Event, Level, RunFacts, now
from tfdist.telemetry.json_text import to_json

LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
FATAL = ("training_diverged", "run_failed", "left_unsaved")


class JsonLog(Console):
    """`Console` of any worker; the chief alone logs epochs and progress."""

    def __init__(self, is_chief: bool) -> None:
        super().__init__()
        self._is_chief = is_chief
        self._run: RunFacts | None = None
        self._last_time = time.monotonic()

    def set_run(self, run: RunFacts) -> None:
        self._run = run

    def start(self, plan: TrainingPlan) -> None:
        self._write("INFO", event="training", total_steps=plan.total_steps, total_epochs=plan.total_epochs)

    def update(self, progress: Progress) -> None:
        if time.monotonic() - self._last_time >= PROGRESS_LINE_SECONDS:
            self._write_figures(progress, "progress", progress.metrics)

    def end_epoch(self, summary: EpochSummary) -> None:
        evaluated = {f"eval_{name}": value for name, value in summary.eval_metrics.items()}
        self._write_figures(summary, "epoch_ended", {**summary.metrics, **evaluated})

    def message(self, text: str, level: Level = "info") -> None:
        self._write(LEVELS[level], message=text)

    def event(self, event: Event) -> None:
        level = "FATAL" if event.name in FATAL else LEVELS[event.level]
        self._write(level, event=event.name, step=event.step, message=event.message, details=event.details)

    def _write_figures(self, figures: Progress | EpochSummary, event: str, metrics: Mapping[str, Any]) -> None:
        self._last_time = time.monotonic()
        if self._is_chief:
            place = {"event": event, "epoch": figures.epoch, "step": figures.step, "loss": metrics.get("loss")}
            self._write("INFO", **place, examples_per_second=figures.examples_per_second, metrics=metrics)

    def _write(self, level: str, **fields: Any) -> None:
        line = {
            "time": time_text(now()),
            "level": level,
            "job_id": self._run and self._run.run_id,
            "worker": self._run and self._run.worker,
            **dict.fromkeys(("event", "epoch", "step", "loss")),
            "gpu_memory_used": device_memory_bytes(),
            "message": None,
        }
        with outliving_terminal():
            print(f"{to_json(line | fields)}\n", end="", flush=True)  # at once: other threads write, too
