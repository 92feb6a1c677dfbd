"""What recipes cost: gradient checkpointing, a norm that is logged.

Each is divided by the same step without it. Memory is what a process's peak grows by in its first steps, in processes
of their own, in turn. Takes about three minutes.

    python benchmarks/recipes.py [--part=PART] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Figure, choose_size, figures_of, ratio, report

PARTS = ("peak", "times")
ROUNDS = choose_size(3, 1)


def measure(parts: Sequence[str]) -> list[Figure]:
    return [figure for part in parts for figure in {"peak": peak, "times": times}[part]()]


def peak() -> list[Figure]:
    peaks = [[figures_of("recipes_parts", "peak", how)[0].ours for how in ("again", "kept")] for _ in range(ROUNDS)]
    again, kept = zip(*peaks, strict=True)
    return [ratio("recompute: peak memory", again, kept, 0.35, unit="MB", at_most=True)]


def times() -> list[Figure]:
    return figures_of("recipes_parts", "times")


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS)
