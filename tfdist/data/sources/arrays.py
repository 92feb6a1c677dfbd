"""Examples held in memory as arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.cache.identity import digest
from tfdist.data.sources.source import RandomAccessSource
from tfdist.errors import UserError


class ArraySource(RandomAccessSource):
    """A nest of arrays whose first axis counts the examples: `(x, y)`, `(x, y, sample_weight)`, dicts of them.

    float64 arrays are held as float32, the type in which Keras computes.

    Raises:
      UserError: the nest is empty, or its arrays do not agree on the number of examples.
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = tf.nest.map_structure(_as_array, arrays)
        flat = tf.nest.flatten(self._arrays)
        sizes = sorted({len(a) for a in flat})
        if len(sizes) != 1:
            raise UserError(
                f"The arrays of a data set must all hold the same number of examples along their first axis; received "
                f"lengths {sizes}."
                if sizes
                else "The data function returned no arrays."
            )
        self.num_examples = sizes[0]

        self.structure = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), self._arrays)

    def identity(self) -> str:
        return digest("arrays in memory", tf.nest.flatten(self._arrays))

    def held(self) -> Any:
        return self._arrays

    def gatherer(self) -> Callable[[tf.Tensor], Any]:
        tensors = tf.nest.map_structure(tf.constant, self._arrays)
        return lambda indices: tf.nest.map_structure(lambda t: tf.gather(t, indices), tensors)


def _as_array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype == object or array.ndim == 0:
        raise UserError(
            f"A data function returns arrays with one entry an example; received {type(value).__name__} "
            f"{str(value)[:60]!r}."
        )
    return array.astype(np.float32) if array.dtype == np.float64 else array
