"""One long row of tokens, cut into sequences for a model that predicts the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist.data.sources.arrays import ArraySource
from tfdist.errors import UserError
from tfdist.settings.checks import COUNT


class TokenWindows(ArraySource):
    """Packed sequences: example i is (tokens i·L … i·L + L - 1, the same one place on), int32 [n, L] both.

    Documents follow each other in the row, with a token between them if the data puts one there, so no place is
    padding; what is left at the end is not used.

    Args:
      tokens: a function that returns the row, whole numbers [m], or the array itself. It is held in memory.
      length: L.

    Raises:
      UserError: the tokens are no row of whole numbers, or fewer than one sequence.
    """

    def __init__(self, tokens: Callable[[], Any] | np.ndarray, *, length: int) -> None:
        COUNT("TokenWindows.length", length)
        row = np.asarray(tokens() if callable(tokens) else tokens)
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise UserError(
                f"TokenWindows.tokens gives {row.dtype}{list(row.shape)}; it must give one row of whole numbers, [m]."
            )
        if len(row) < length + 1:
            raise UserError(f"TokenWindows has {len(row)} tokens, fewer than length + 1, here {length + 1}.")
        used = (len(row) - 1) // length * length
        row = row[: used + 1].astype(np.int32)
        super().__init__((row[:-1].reshape(-1, length), row[1:].reshape(-1, length)))
