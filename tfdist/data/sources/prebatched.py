"""Batches that the user made: each element of a stream is the global batch of one step, of whatever size it has.

Invariant: every worker reads every batch and takes its replicas' parts, so a batch does not depend on how many there
are. Made by `keras_fit`, where data comes in batches as `keras.Model.fit` takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.sources.user_dataset import StreamSource, split_batches
from tfdist.errors import UserError
from tfdist.strategies.strategy import Topology

Stream = Callable[[int], tf.data.Dataset]


class PrebatchedSource(StreamSource):
    """Examples in batches as they come.

    Args:
      stream: gives the batches from a step of the stream on, without end.
      element_spec: of a batch: a tuple (x,), (x, y) or (x, y, sample_weight).
      num_batches: of an epoch.
      batch_size: examples of a full batch.
      begins_at: the step of the run that the stream's first batch is for.
      parallel: whether several workers read the same batches, each for itself.
      first_batch: gives the first batch that was read, of a stream that may not be opened once more to look at it.

    Raises:
      UserError: the batches are no dense tensors with one entry an example.
    """

    counts_examples = False

    def __init__(
        self,
        stream: Stream,
        element_spec: Any,
        *,
        num_batches: int,
        batch_size: int,
        begins_at: int = 0,
        parallel: bool = True,
        first_batch: Callable[[], Any] | None = None,
    ) -> None:
        self._stream = stream
        self._begins_at = begins_at
        self._parallel = parallel
        self._first_batch = first_batch
        self.has_same_batches = parallel and first_batch is None  # without the former it is refused
        self.batch_size = batch_size
        self.num_examples = num_batches * batch_size
        self.structure = tf.nest.map_structure(_batch_spec, element_spec)

    def first_batch(self) -> Any:
        """The first batch that was read, of a stream that is read once."""
        return None if self._first_batch is None else self._first_batch()

    def local_batches(self, plan: BatchPlan, topology: Topology, first_step: int) -> tf.data.Dataset:
        """Cuts each batch into the parts of this worker's replicas."""
        if plan.pad:
            raise UserError(
                "The strategy needs batches of one size, and data that comes in batches may have others. Give arrays, "
                "or one of tfdist's sources."
            )
        if topology.num_workers > 1 and not self._parallel:
            raise UserError(
                "A Python generator is read once, in one process, so several workers cannot take parts of its batches. "
                "Give a keras.utils.PyDataset, a tf.data.Dataset or arrays."
            )

        def slice_batch(step: tf.Tensor, replica: tf.Tensor, batch: Any) -> dict[str, tf.Tensor]:
            del step
            return plan.replica_slice_of_batch(tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0], replica)

        batches = self._stream(max(0, first_step - self._begins_at))
        if plan.total_parts == 1:
            return batches.map(lambda *batch: {"examples": batch})
        return split_batches(batches.map(lambda *batch: batch), topology, first_step, slice_batch)


def missing_input_error(data: str) -> UserError:
    """The error for data that leaves an input out, which `keras.Input(optional=True)` allows."""
    return UserError(
        f"{data} has None for an input of the model. Every input needs a value, optional ones too: give an array, or "
        "train a model that is made without that input."
    )


def _batch_spec(spec: Any) -> tf.TensorSpec:
    if type(spec).__name__ in ("OptionalSpec", "NoneTensorSpec"):  # the latter is private to TensorFlow
        raise missing_input_error("The data")
    if not isinstance(spec, tf.TensorSpec):
        raise UserError(f"The data gives {spec}; it has to give dense tensors. Pad ragged and densify sparse ones.")
    if spec.shape.rank is None or spec.shape.rank < 1:
        raise UserError(
            f"The data gives single examples or tensors of unknown shape, {spec}; fit takes batches. Write "
            "dataset.batch(32)."
        )
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
