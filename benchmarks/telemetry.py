"""What it costs to see a run.

report: the page of a run of 200,000 points, drawn by a process of its own: its seconds, imports included, and the size
of the page. sinks: a step of a few milliseconds with every sink, or with one that hangs, ÷ one without. Both are epochs
of one training that turns the sinks on and off, since two processes differ by more than what is looked for.

    python benchmarks/telemetry.py [--json=FILE] [--part=PART] [--points=200000] [--rounds=7]
"""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Figure, figures_of, report

PARTS = ("report", "sinks")


def measure(parts: Sequence[str], *, points: int, rounds: int) -> list[Figure]:
    figures = figures_of("telemetry_parts", "report", points, rounds) if "report" in parts else []
    if "sinks" in parts:
        for which in ("all", "hangs"):
            figures += figures_of("telemetry_steps", "steps", which, rounds)
    return figures


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, numbers={"points": 200_000, "rounds": 7})
