"""Objects that give numbered examples. TensorFlow is not imported, so that processes which only read start quickly."""

from __future__ import annotations

from typing import Any

import numpy as np

EXAMPLES = 29


class Squares:
    """As data sets for torch are written."""

    def __init__(self, count: int = EXAMPLES, fails_at: int | None = None, odd_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at
        self.odd_at = odd_at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        if number == self.fails_at:
            raise KeyError(f"no file for {number}")
        return np.full(3 if number == self.odd_at else 2, number * number, np.float64), number


class AtOnce(Squares):
    """Gives several examples at a time, and no single one."""

    def __getitem__(self, number: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [Squares.__getitem__(self, number) for number in numbers]
