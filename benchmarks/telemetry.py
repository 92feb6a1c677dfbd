"""What it costs to see a run.

report: the page of a run of 200,000 points, drawn by a process of its own: its seconds, imports included, and the
size of the page

python benchmarks/telemetry.py [--json=FILE] [--part=PART] [--points=200000] [--rounds=3]
"""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Figure, figures_of, report

PARTS = ("report",)


def measure(parts: Sequence[str], *, points: int, rounds: int) -> list[Figure]:
    return [figure for part in parts for figure in figures_of("telemetry_parts", part, points, rounds)]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, numbers={"points": 200_000, "rounds": 3})
