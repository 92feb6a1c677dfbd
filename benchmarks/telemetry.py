"""What it costs to see a run.

report: the page of a run of 200,000 points, drawn by a process of its own: its seconds, imports included, and the size
of the page. sinks: a step of a few milliseconds with every sink ÷ one without, each training in a process of its own,
in turn, and the processor time of all that the sinks start ÷ the training's; and a step while a sink hangs ÷ one while
it does not, epochs of one training.

    python benchmarks/telemetry.py [--json=FILE] [--part=PART] [--points=200000] [--rounds=5]
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import Figure, choose_size, figures_of, ratio, report

PARTS = ("report", "sinks")
MOST_SECONDS, MOST_MEGABYTES = 5.0, 5.0


def measure(parts: Sequence[str], *, points: int, rounds: int) -> list[Figure]:
    figures = draw_report(points, rounds) if "report" in parts else []
    if "sinks" in parts:
        figures += [*_every_sink(rounds), *figures_of("telemetry_steps", "hangs", rounds)]
    return figures


def draw_report(points: int, rounds: int) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        run_dir = Path(scratch)
        with (run_dir / "metrics.jsonl").open("w") as log:
            for step in range(1, points + 1):
                metrics = {"loss": 1 / math.sqrt(step), "accuracy": 1 - 1 / step, "gradient_norm": step % 97 / 97}
                place = {"step": step, "epoch": 1, "split": "train", "learning_rate": 1e-3}
                log.write(json.dumps(place | metrics) + "\n")
        seconds = [_seconds([sys.executable, "-m", "tfdist.report", scratch]) for _ in range(rounds)]
        size = (run_dir / "report" / "index.html").stat().st_size / 1e6
    name = f"report of {points:,} points"
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


def _every_sink(rounds: int) -> list[Figure]:
    found: dict[str, list[list[Figure]]] = {"none": [], "all": []}
    for _ in range(rounds):
        for which, figures in found.items():
            figures.append(figures_of("telemetry_steps", "steps", which))
    with_all, without = ([step.ours for step, _ in found[which]] for which in ("all", "none"))
    sinks, training = ([getattr(beside, side) for _, beside in found["all"]] for side in ("ours", "peer"))
    return [
        ratio("a step with every sink ÷ without", with_all, without, 1.01, unit="ms", at_most=True),
        ratio("what every sink computes ÷ the training", sinks, training, 0.01, unit="s of CPU", at_most=True),
    ]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, numbers={"points": choose_size(200_000, 100), "rounds": choose_size(5, 1)})
