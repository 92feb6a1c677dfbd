"""Sweep journals for the tests of what one sees of a sweep: written as the sweep writes them, with made-up figures."""

from __future__ import annotations

import datetime
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

SPACE: dict[str, dict[str, Any]] = {
    "train.learning_rate": {"kind": "float", "low": 1e-4, "high": 1e-1, "sampling": "log"},
    "models.build.layers": {"kind": "integer", "low": 1, "high": 4, "sampling": "linear"},
    "models.build.kind": {"kind": "choice", "values": ["mlp", "convnet"]},
    "models.build.filters": {"kind": "choice", "values": [16, 32, 64], "under": {"models.build.kind": ["convnet"]}},
    "train.use_ema": {"kind": "boolean", "values": [False, True]},
    "Dropout.rate": {"kind": "float", "low": 0.0, "high": 0.6, "sampling": "linear"},
}
START = datetime.datetime(2026, 3, 1, 9, 0, tzinfo=datetime.UTC)


class Journal:
    """Builds the events of a sweep; each call is a minute later unless `seconds` says otherwise."""

    def __init__(self, *, space: Mapping[str, Any] = SPACE, direction: str = "max", **header: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = START
        self.header = {"objective": "val_accuracy", "direction": direction, "search": "random", "space": dict(space)}
        self.header |= {"max_trials": 60} | header

    def add(self, kind: str, *, seconds: float = 60.0, **fields: Any) -> Journal:
        self.now += datetime.timedelta(seconds=seconds)
        asked = {"asked": 0} if kind.startswith("trial_") else {}
        self.events.append({"event": kind, "time": self.now.isoformat(), **asked, **fields})
        return self

    def begin(self, *, seconds: float = 0.0) -> Journal:
        return self.add("sweep_started", seconds=seconds, **self.header)

    def start(self, trial: str, values: Mapping[str, Any] | None = None, *, rung: int = 0, epochs: int = 3) -> Journal:
        fields = {"trial": trial, "values": dict(values or {}), "rung": rung, "epochs": epochs}
        return self.add("trial_started", seconds=1, **fields)

    def report(self, trial: str, epoch: int, objective: Any, *, seconds: float = 60.0) -> Journal:
        fields = {"trial": trial, "epoch": epoch, "step": epoch * 100, "objective": objective}
        return self.add("trial_reported", seconds=seconds, **fields)

    def end(self, trial: str, objective: Any, status: str = "done", *, rung: int = 0, epochs: int = 3) -> Journal:
        fields = {"trial": trial, "rung": rung, "status": status, "objective": objective, "epochs": epochs}
        message = "The loss is NaN at step 120." if status == "infeasible" else ""
        return self.add("trial_ended", seconds=1, **fields, seconds_=epochs * 60.0, message=message)

    def lines(self) -> list[str]:
        """One line an event."""
        return [json.dumps({"seconds" if k == "seconds_" else k: v for k, v in e.items()}) for e in self.events]

    def write(self, run_dir: pathlib.Path, *, torn: str = "") -> str:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "sweep.jsonl").write_text("".join(line + "\n" for line in self.lines()) + torn, encoding="utf-8")
        return str(run_dir)


def sample(generator: np.random.Generator) -> dict[str, Any]:
    """Values of `SPACE`."""
    values: dict[str, Any] = {
        "train.learning_rate": float(10 ** generator.uniform(-4, -1)),
        "models.build.layers": int(generator.integers(1, 5)),
        "models.build.kind": ["mlp", "convnet"][generator.integers(2)],
        "train.use_ema": bool(generator.integers(2)),
        "Dropout.rate": float(generator.uniform(0, 0.6)),
    }
    if values["models.build.kind"] == "convnet":
        values["models.build.filters"] = [16, 32, 64][generator.integers(3)]
    return values


def hyperband_sweep(num_trials: int = 60, *, direction: str = "max", scale: float = 1.0) -> Journal:
    """Trials in rungs of 3, 9 and 27 epochs, a third promoted each time; every tenth is infeasible."""
    generator = np.random.default_rng(0)
    sign = 1.0 if direction == "max" else -1.0
    journal = Journal(direction=direction, search="hyperband", max_trials=num_trials).begin()
    scores: dict[str, float] = {}
    settings = {f"{index:04d}": sample(generator) for index in range(num_trials)}
    qualities = {name: generator.uniform(0.5, 0.97) for name in settings}

    def objective(name: str, epoch: int) -> float:
        reached = qualities[name] * (1 - math.exp(-epoch / 3)) + generator.normal(0, 0.004)
        return sign * scale * float(reached)

    alive, first = list(settings), 1
    for rung, target in enumerate((3, 9, 27)):
        for name in alive:
            journal.start(name, settings[name], rung=rung, epochs=target)
            if rung == 0 and int(name) % 10 == 9:
                journal.report(name, 1, "nan").end(name, None, "infeasible", epochs=1)
                continue
            for epoch in range(first, target + 1):
                scores[name] = objective(name, epoch)
                journal.report(name, epoch, scores[name])
            status = "done" if rung == 2 else "paused"
            journal.end(name, scores[name], status, rung=rung, epochs=target)
        ranked = sorted((name for name in alive if name in scores), key=lambda name: -sign * scores[name])
        alive, first = ranked[: max(len(alive) // 3, 1)], target + 1
    return journal
