"""What communication between two workers costs.

Two processes, each on a core of its own with one thread for operations, train with communication; the same two
processes train without, at the same time, each as one device on its half of every batch. The first divided by the
second is what is left of the speed. On the dense model tfdist is also divided by a hand-written loop under
MultiWorkerMirroredStrategy, which packs all gradients into one message. Samples are interleaved. Takes three
minutes on two cores.

    python benchmarks/scaling.py [--json=FILE]
"""

from __future__ import annotations

from measuring import Figure, figures_of, report

LAUNCH = ("--workers=2", "--pin_cpus")


def measure() -> list[Figure]:
    return [
        *figures_of("scaling_parts", "multi_worker", launch=LAUNCH),
        *figures_of("scaling_parts", "horovod", launch=(*LAUNCH, "--launcher=horovod")),
    ]


if __name__ == "__main__":
    report(__doc__, measure)
