"""What it costs to see a run.

report: the page of a run of 200,000 points, drawn by a process of its own: its seconds, imports included, and the size
of the page. sinks: a step of a few milliseconds with every sink ÷ one without, each training in a process of its own,
in turn, and the processor time of all that the sinks start ÷ the training's; and a step while a sink hangs ÷ one while
it does not, epochs of one training.

    python benchmarks/telemetry.py [--json=FILE] [--part=PART] [--points=200000] [--rounds=5]
"""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Figure, figures_of, ratio, report

PARTS = ("report", "sinks")


def measure(parts: Sequence[str], *, points: int, rounds: int) -> list[Figure]:
    figures = figures_of("telemetry_parts", "report", points, rounds) if "report" in parts else []
    if "sinks" in parts:
        figures += [*_every_sink(rounds), *figures_of("telemetry_steps", "hangs", rounds)]
    return figures


def _every_sink(rounds: int) -> list[Figure]:
    found: dict[str, list[list[Figure]]] = {"none": [], "all": []}
    for _ in range(rounds):
        for which, figures in found.items():
            figures.append(figures_of("telemetry_steps", "steps", which))
    with_all, without = ([step.ours for step, _ in found[which]] for which in ("all", "none"))
    sinks, training = ([getattr(beside, side) for _, beside in found["all"]] for side in ("ours", "peer"))
    return [
        ratio("a step with every sink ÷ without", with_all, without, 1.01, unit="ms", at_most=True),
        ratio("what every sink computes ÷ the training", sinks, training, 0.01, unit="s of CPU", at_most=True),
    ]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, numbers={"points": 200_000, "rounds": 5})
