"""What recipes cost: gradient checkpointing, sharpness-aware minimization, norms that are logged.

Each is divided by the same step without it. Memory is what a process's peak grows by in its first steps, in processes
of their own, in turn. Takes about three minutes.

    python benchmarks/recipes.py [--json=FILE]
"""

from __future__ import annotations

from measuring import Figure, figures_of, ratio, report

ROUNDS = 3


def measure() -> list[Figure]:
    peaks = [[figures_of("recipes_parts", "peak", how)[0].ours for how in ("again", "kept")] for _ in range(ROUNDS)]
    again, kept = zip(*peaks, strict=True)
    memory = ratio("recompute: peak memory", again, kept, 0.35, unit="MB", at_most=True)
    return [memory, *figures_of("recipes_parts", "times")]


if __name__ == "__main__":
    report(__doc__, measure)
