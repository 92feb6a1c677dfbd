"""What sharded state costs and saves, and what sums in one order cost, with two workers.

A dense transformer encoder of 9.5 million weights trains with Adam in two processes, each on a core of its own with one
thread for operations. A step with `train.sharding` is divided by one without, in the same processes, interleaved; one
with sharded weights by one that computes blocks again, one with canonical replicas by one with as many microbatches.
What the optimizer holds is counted, and the peak of a process is what it grows by in two steps, in processes of their
own, in turn. Beside PyTorch's FSDP2 over gloo, on the same encoder, where tools/peers.sh has been run. Takes some ten
minutes.

    python benchmarks/sharding.py [--json=FILE]
"""

from __future__ import annotations

from measuring import Figure, figures_of, ratio, report
from peer import PYTHON

LAUNCH = ("--workers=2", "--pin_cpus")
ROUNDS = 3


def measure() -> list[Figure]:
    figures = []
    for strategy, launch in (("multi_worker", LAUNCH), ("horovod", (*LAUNCH, "--launcher=horovod"))):
        figures += figures_of("sharding_parts", "times", strategy, launch=launch)
    peaks: dict[str, list[float]] = {"none": [], "optimizer": [], "gradients": [], "weights": []}
    fsdp2: list[float] = []
    for _ in range(ROUNDS):
        for sharding, found in peaks.items():
            found.append(figures_of("sharding_parts", "peak", sharding, launch=LAUNCH)[0].ours)
        if PYTHON.exists():
            fsdp2.append(figures_of("sharding_parts", "peak_of_fsdp2")[0].ours)
    for sharding in ("optimizer", "gradients", "weights"):
        name = f"{sharding}: peak memory ÷ without"
        figures.append(ratio(name, peaks[sharding], peaks["none"], None, unit="MB", at_most=True))
    if fsdp2:
        figures.append(ratio("weights: peak memory ÷ FSDP2", peaks["weights"], fsdp2, 1.0, unit="MB", at_most=True))
    return figures


if __name__ == "__main__":
    report(__doc__, measure)
