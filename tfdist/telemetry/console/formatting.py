"""Numbers as a terminal shows them: sizes in bytes, and a curve in a line of signs."""

from __future__ import annotations

from collections.abc import Sequence

UNITS = ("KiB", "MiB", "GiB", "TiB")


def in_bytes(count: float) -> str:
    """ "1.5 KiB", "64 MiB": to a tenth of the largest unit that there is one of."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in UNITS:
        count /= 1024
        if count < 1024 or unit == UNITS[-1]:
            break
    return f"{count:.1f}".removesuffix(".0") + f" {unit}"


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
