"""Examples held in memory as arrays."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.sources.source import Order, Reader, Source, permute
from tfdist.errors import UserError

TENSOR_ALIGNMENT = 64  # bytes: TensorFlow's kernels refuse other memory


class ArraySource(Source):
    """A nest of arrays whose first axis counts the examples: `(x, y)`, `(x, y, sample_weight)`, dicts of them.

    float64 arrays are held as float32, the type in which Keras computes; arrays of objects are texts, str or bytes.
    Once a pipeline reads from it, it holds a copy of its own, which the pipelines share: `tf.constant` would make two
    more, and keep one, for each of them.

    Raises:
      UserError: the nest is empty, its arrays do not agree on the number of examples, or one holds other objects.
    """

    cheaper = "Nothing is decoded: take a larger global_batch_size, so that a batch costs less an example"

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
        self._tensors: Any = None
        self.structure = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), self._arrays)

    def arrays_in_memory(self) -> Any:
        """The arrays, whose memory the pipelines share."""
        return self._arrays

    def reader(self, order: Order) -> Reader:
        """Gathers the examples that the order has at the positions."""
        gather, num_examples, seed = self.gatherer(), self.num_examples, order.seed
        return lambda positions, epoch: gather(permute(positions, epoch, num_examples=num_examples, seed=seed))

    def gatherer(self) -> Callable[[tf.Tensor], Any]:
        """A function from indices, int64 [n], to those rows of tensors that all pipelines share."""
        if self._tensors is None:
            self._arrays = tf.nest.map_structure(_copy_aligned, self._arrays)
            self._tensors = tf.nest.map_structure(_as_tensor, self._arrays)
        tensors = self._tensors
        return lambda indices: tf.nest.map_structure(lambda t: tf.gather(t, indices), tensors)


def _is_shareable(array: np.ndarray) -> bool:
    return array.dtype.kind in "iuf" and array.dtype.isnative and array.size > 0


def _copy_aligned(array: np.ndarray) -> np.ndarray:
    """A copy whose memory can be a tensor's; arrays of other types than numbers as they are."""
    if not _is_shareable(array):
        return array
    room = np.empty(array.nbytes + TENSOR_ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % TENSOR_ALIGNMENT
    copy = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _as_tensor(array: np.ndarray) -> tf.Tensor:
    """A tensor of the memory of what `_copy_aligned` gave, where that is possible."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__()) if _is_shareable(array) else tf.constant(array)


def _as_array(value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
        tf.as_dtype(array.dtype)
    except (TypeError, ValueError) as error:
        raise UserError(f"A data function returns arrays; received {_format(value)}: {error}") from error
    if array.ndim == 0:
        hint = " A list counts as a nest of arrays: write np.array(…) around it." if np.isscalar(value) else ""
        raise UserError(f"A data function returns arrays with one entry an example; received {_format(value)}.{hint}")
    strange = [item for item in array.flat if not isinstance(item, str | bytes)] if array.dtype == object else []
    if strange:
        raise UserError(
            "A data function returns arrays of numbers or of texts, str or bytes; received Python objects, such as "
            f"{reprlib.repr(strange[0])}."
        )
    return array.astype(np.float32) if array.dtype.kind == "f" and array.dtype.itemsize == 8 else array


def _format(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
