"""The curves of metrics.jsonl, and curves with fewer points that look the same.

Invariant: a curve's steps grow. What `thinned` leaves are points of the curve, the highest and the lowest of each
stretch among them, so that no spike is lost.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from tfdist.telemetry.records import Unreadable, read_lines

LEARNING_RATE = "learning_rate"
_PLACE = frozenset({"step", "epoch", "split"})


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values at steps; NaN where there was no number."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def num_not_finite(self) -> int:
        return int(np.sum(~np.isfinite(self.values)))

    def thinned(self, most: int) -> Curve:
        """The curve, or about `most` points of it."""
        count = len(self.steps)
        if count <= most:
            return self
        is_number = np.isfinite(self.values)
        lowest, highest = np.where(is_number, self.values, np.inf), np.where(is_number, self.values, -np.inf)
        edges = np.linspace(0, count, most // 2 + 1).astype(int)
        kept = {0, count - 1}
        for first, last in itertools.pairwise(edges):
            kept |= {int(first + lowest[first:last].argmin()), int(first + highest[first:last].argmax())}
        places = sorted(kept)
        return Curve(self.steps[places], self.values[places])


def read_curves(path: str, unreadable: Unreadable) -> dict[tuple[str, str], Curve]:
    """The curves by metric and split; a metric that is an array of numbers has none."""
    found: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    for line in read_lines(path, unreadable):
        step, split = line.get("step"), line.get("split")
        if not isinstance(step, int) or not isinstance(split, str):
            unreadable.lines += 1
            continue
        for name, value in line.items():
            number = None if name in _PLACE else _number(value)
            if number is not None:
                steps, values = found.setdefault((name, split), ([], []))
                steps.append(step)
                values.append(number)
    return {key: _curve(*points) for key, points in found.items()}


def _curve(steps: list[int], values: list[float]) -> Curve:
    """Of a step that stands there twice, which a restart may leave, the later one counts."""
    x, y = np.array(steps), np.array(values)
    if np.all(np.diff(x) > 0):
        return Curve(x, y)
    x, last = np.unique(x[::-1], return_index=True)
    return Curve(x, y[::-1][last])


def _number(value: Any) -> float | None:
    """A metric's value; the log writes what JSON has no number for as "nan", "inf" and "-inf"."""
    if isinstance(value, str):
        return math.nan if value in ("nan", "inf", "-inf") else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
