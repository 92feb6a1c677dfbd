"""A curve in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
HEIGHT = 4  # lines


def curve(values: Sequence[float]) -> list[str]:
    """Lines of blocks, a column for each value, from 0 or the least value to the greatest."""
    low, high = min(0.0, *values), max(0.0, *values)
    steps = HEIGHT * (len(BLOCKS) - 1)
    filled = [round((value - low) / ((high - low) or 1.0) * steps) for value in values]
    lines = []
    for row in reversed(range(HEIGHT)):
        lines.append("".join(BLOCKS[min(max(each - row * (len(BLOCKS) - 1), 0), len(BLOCKS) - 1)] for each in filled))
    return [line.rstrip() for line in lines]
