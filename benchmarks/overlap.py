"""How much of the time in which gradients travel something is computed: dense 19 MB, two workers, by a trace.

TensorFlow's profiler notes when each operation ran. The figure is the time in which a reduction and a kernel of the
forward or backward pass run at once ÷ that in which a reduction runs; with all gradients in one message there is
nothing left to compute. Takes half a minute on two cores.

    python benchmarks/overlap.py [--json=FILE]
"""

from __future__ import annotations

from measuring import Figure, figures_of, report

LAUNCH = ("--workers=2", "--pin_cpus")


def measure() -> list[Figure]:
    return figures_of("overlap_parts", "multi_worker", launch=LAUNCH)


if __name__ == "__main__":
    report(__doc__, measure)
