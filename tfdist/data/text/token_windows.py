"""One long row of tokens, cut into sequences for a model that predicts the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.sources.source import RandomAccessSource
from tfdist.errors import UserError
from tfdist.settings.checks import COUNT


class TokenWindows(RandomAccessSource):
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
            raise UserError(f"TokenWindows has {len(row)} tokens, fewer than length + 1 = {length + 1}.")
        self._length = length
        self.num_examples = (len(row) - 1) // length
        self._row = row[: self.num_examples * length + 1].astype(np.int32)
        self.structure = (tf.TensorSpec([None, length], tf.int32), tf.TensorSpec([None, length], tf.int32))

    def gatherer(self) -> Callable[[tf.Tensor], Any]:
        row, length = tf.constant(self._row), self._length

        def gather(indices: tf.Tensor) -> Any:
            places = indices[:, tf.newaxis] * length + tf.range(length, dtype=tf.int64)
            return tf.gather(row, places), tf.gather(row, places + 1)

        return gather

    def describe(self) -> list[str]:
        return [f"{len(self._row):,} tokens in sequences of {self._length}"]
