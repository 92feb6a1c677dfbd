"""What sharded state costs and saves, and what sums in one order cost.

The parts `times` and `times_horovod` divide, in the same processes and interleaved, a step with `train.sharding` by one
without, one with sharded weights by one that computes blocks again, one with canonical replicas by one with as many
microbatches, and some by PyTorch's FSDP2 over gloo where tools/peers.sh has been run: a transformer encoder of 9.5
million weights with Adam, two workers with a core and one thread for operations each. The part `peak` tells what a
process grows by in two steps of an encoder of 59 million weights (0.94 GB of weights, gradients and slots), with 2 and
4 workers, in processes of their own. The part `checkpoint` stores one of 113 MB from 4 workers into a store that takes
20 MB/s a stream.

    python benchmarks/sharding.py [--part=PART] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from emulator import emulator
from measuring import Figure, choose_size, figures_of, ratio, report
from peer import PYTHON

PARTS = ("times", "times_horovod", "peak", "checkpoint")
LAUNCH = ("--workers=2", "--pin_cpus")
PEAK_ROUNDS, CHECKPOINT_ROUNDS = 1, choose_size(3, 1)
WIDTH, LARGE_WIDTH = choose_size((256, 640), (8, 16))  # 9.5 and 59 million weights
MOST_WORKERS = choose_size(4, 2)
STREAM_BYTES_PER_SECOND = 20e6


def measure(parts: Sequence[str]) -> list[Figure]:
    measures = {"times": times, "times_horovod": times_horovod, "peak": peaks, "checkpoint": checkpoints}
    return [figure for part in parts for figure in measures[part]()]


def times() -> list[Figure]:
    return figures_of("sharding_parts", "times", "multi_worker", launch=LAUNCH)


def times_horovod() -> list[Figure]:
    return figures_of("sharding_parts", "times", "horovod", launch=(*LAUNCH, "--launcher=horovod"))


def peaks() -> list[Figure]:
    figures = []
    ways = choose_size(("none", "optimizer", "weights"), ("none", "weights"))
    for workers in sorted({2, MOST_WORKERS}):
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(PEAK_ROUNDS):
            for sharding, grown in found.items():
                launch = (f"--workers={workers}",)
                (figure,) = figures_of("sharding_parts", "peak", sharding, LARGE_WIDTH, launch=launch)
                grown.append(figure.ours)
        for sharding in ways[1:]:
            name = f"{workers} workers, {sharding}: peak memory ÷ without"
            goal = 1 / workers + 0.05 if sharding == "weights" else None
            figures.append(ratio(name, found[sharding], found["none"], goal, unit="MB", at_most=True))
    if PYTHON.exists():
        ours, theirs = [], []
        for _ in range(PEAK_ROUNDS):
            ours.append(figures_of("sharding_parts", "peak", "weights", WIDTH, launch=LAUNCH)[0].ours)
            theirs.append(figures_of("sharding_parts", "peak_of_fsdp2")[0].ours)
        figures.append(ratio("weights: peak memory ÷ FSDP2", ours, theirs, 1.0, unit="MB", at_most=True))
    return figures


def checkpoints() -> list[Figure]:
    slow = {"kind": "slow_upload", "path": "upload", "count": None, "bytes_per_second": STREAM_BYTES_PER_SECOND}
    seconds: dict[str, list[float]] = {"all": [], "chief": []}
    for _ in range(CHECKPOINT_ROUNDS):
        for writers, found in seconds.items():
            with emulator(slow):
                (figure,) = figures_of("sharding_parts", "checkpoint", writers, launch=(f"--workers={MOST_WORKERS}",))
            found.append(figure.ours)
    name = f"checkpoint by all of {MOST_WORKERS} workers ÷ by the chief"
    return [ratio(name, seconds["all"], seconds["chief"], 0.4, unit="s", at_most=True)]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS)
