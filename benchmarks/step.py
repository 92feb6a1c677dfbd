"""What a training step costs beside a hand-written loop and beside `keras.Model.fit`.

On one device tfdist's step is divided by a `tf.range` loop inside one `tf.function`, with the same number of steps a
call and the same work, and by `fit`; under MirroredStrategy with two logical CPU devices by the same two under that
strategy. One strategy a process; within it the samples are interleaved. Takes under two minutes.

    python benchmarks/step.py [--part=PART] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Figure, figures_of, report

PARTS = ("one_device", "mirrored")


def measure(parts: Sequence[str]) -> list[Figure]:
    return [figure for part in parts for figure in figures_of("step_parts", part)]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS)
