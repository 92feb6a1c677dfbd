"""The parts of telemetry.py; each runs in a process of its own."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import Figure

MOST_SECONDS, MOST_MEGABYTES = 5.0, 5.0


def report(points: str, rounds: str) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        run_dir = Path(scratch)
        with (run_dir / "metrics.jsonl").open("w") as log:
            for step in range(1, int(points) + 1):
                metrics = {"loss": 1 / math.sqrt(step), "accuracy": 1 - 1 / step, "gradient_norm": step % 97 / 97}
                place = {"step": step, "epoch": 1, "split": "train", "learning_rate": 1e-3}
                log.write(json.dumps(place | metrics) + "\n")
        seconds = [_seconds([sys.executable, "-m", "tfdist.report", scratch]) for _ in range(int(rounds))]
        size = (run_dir / "report" / "index.html").stat().st_size / 1e6
    name = f"report of {int(points):,} points"
    return [
        _at_most(f"{name}, seconds", seconds, MOST_SECONDS, "s"),
        _at_most(f"{name}, megabytes", [size], MOST_MEGABYTES, "MB"),
    ]


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _at_most(name: str, values: list[float], goal: float, unit: str) -> Figure:
    value = statistics.median(values)
    ends = min(values), max(values)
    return Figure(name, value, goal, ends, value, goal, unit, at_most=True, value_unit=unit, rounds=len(values))
