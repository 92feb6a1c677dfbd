"""What communication between two workers costs.

Two processes, each on a core of its own with one thread for operations, train with communication; the same two
processes train without, at the same time, each as one device on its half of every batch. The first divided by the
second is what is left of the speed. On the dense model tfdist is also divided by a hand-written loop under
MultiWorkerMirroredStrategy, which packs all gradients into one message. Samples are interleaved. Takes three
minutes on two cores.

    python benchmarks/scaling.py [--part=PART] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Figure, figures_of, report

PARTS = ("multi_worker", "horovod")
LAUNCH = {
    "multi_worker": ("--workers=2", "--pin_cpus"),
    "horovod": ("--workers=2", "--pin_cpus", "--launcher=horovod"),
}


def measure(parts: Sequence[str]) -> list[Figure]:
    return [figure for part in parts for figure in figures_of("scaling_parts", part, launch=LAUNCH[part])]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS)
