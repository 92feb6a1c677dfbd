"""What it costs to see a run.

report: the page of a run of 200,000 points, drawn by a process of its own: its seconds, imports included, and the size
of the page. sinks: a step of about a millisecond with every sink, or with one that hangs, ÷ one without, each training
in a process of its own, in turn.

    python benchmarks/telemetry.py [--json=FILE] [--part=PART] [--points=200000] [--rounds=5]
"""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Figure, figures_of, ratio, report

PARTS = ("report", "sinks")


def measure(parts: Sequence[str], *, points: int, rounds: int) -> list[Figure]:
    figures = figures_of("telemetry_parts", "report", points, rounds) if "report" in parts else []
    return figures + (sinks(rounds) if "sinks" in parts else [])


def sinks(rounds: int) -> list[Figure]:
    found: dict[str, list[float]] = {"none": [], "all": [], "hangs": []}
    for _ in range(rounds):
        for which, milliseconds in found.items():
            milliseconds.append(figures_of("telemetry_steps", "steps", which)[0].ours)
    told = {"unit": "ms", "at_most": True}
    return [
        ratio("a step with every sink ÷ without", found["all"], found["none"], 1.01, **told),
        ratio("a step with a sink that hangs ÷ without", found["hangs"], found["none"], 1.01, **told),
    ]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, numbers={"points": 200_000, "rounds": 5})
