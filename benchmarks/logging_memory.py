"""What a run's memory grows by as it logs points: resident memory at the end beside that after a tenth of them.

The points go through the run's own log, to metrics.jsonl and to TensorBoard in a temporary directory: train and eval by
turns, with a loss, an accuracy and a learning rate that are new in each. Some five minutes for 200,000 points.

    python benchmarks/logging_memory.py [--points=200000] [--json=FILE]
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from measuring import Figure, choose_size, figures_of, report

DEFAULT_POINTS = choose_size(200_000, 100)
GOAL = 1.01


def measure(*, points: int) -> list[Figure]:
    return figures_of("logging_memory", "logged", points)


def logged(points: str) -> list[Figure]:
    """The figure for so many points, in a process that does nothing else."""
    from tfdist.telemetry.logs.metrics import MetricsLog
    from tfdist.telemetry.run_directory import RunDirectory

    count = int(points)
    tenth = max(1, count // 10)
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as directory:
        log = MetricsLog(RunDirectory(directory))
        before = 0.0
        for step in range(1, count + 1):
            metrics = {"loss": 1 / step, "accuracy": 1 - 1 / step}
            log.log(step=step, epoch=step, split=("eval", "train")[step % 2], metrics=metrics, learning_rate=0.1 / step)
            if step == tenth:
                before = _resident_megabytes()
        after = _resident_megabytes()
        log.close()
    ratio = after / before
    name = f"resident memory after {count:,} logged points ÷ after {tenth:,}"
    return [Figure(name, ratio, GOAL, (ratio, ratio), after, before, "MB", at_most=True)]


def _resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    report(__doc__, measure, numbers={"points": DEFAULT_POINTS})
