"""The rows of all replicas together, for what has to see a whole global batch.

Invariant: every replica gets the same rows, in the order in which replicas hold them, and a gradient flows back to its
own alone; gradients of what each computes from the whole thus add up to that of one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.base import sum_by_type, with_device

REDUCED_AS_THEY_ARE = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)


def num_replicas() -> int:
    """How many replicas compute at once; 1 outside of a replica context."""
    context = tf.distribute.get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def replica_index() -> tf.Tensor:
    """int32 scalar, this replica's among all of the run."""
    context = tf.distribute.get_replica_context()
    return tf.constant(0) if context is None else tf.cast(tf.reshape(context.replica_id_in_sync_group, []), tf.int32)


def static_replica_index() -> int:
    """This replica's index among all of the run, while it is traced; every replica is traced by itself."""
    context = tf.distribute.get_replica_context()
    index = 0 if context is None else tf.get_static_value(context.replica_id_in_sync_group)
    assert index is not None, "the strategy traces all replicas as one"
    return int(index)


def gather_rows(tensors: Sequence[tf.Tensor], *, room: int) -> list[tf.Tensor]:
    """Each tensor, [n, …] with the same n, with the rows of all replicas, [Σ n, …]; in replica context.

    Each replica puts its rows in their place among zeros, and the replicas add up.

    Args:
      tensors: this replica's rows.
      room: the most rows that all replicas have together. TensorFlow's collectives demand that what they reduce inside
        a loop has one size in every iteration.
    """
    if num_replicas() == 1:
        return list(tensors)
    count = tf.shape(tensors[0])[0]
    (counts,) = _sum_lengths([count * tf.one_hot(replica_index(), num_replicas(), dtype=tf.int32)])
    first, total = tf.reduce_sum(counts[: replica_index()]), tf.reduce_sum(counts)

    def scatter_rows(tensor: tf.Tensor) -> tf.Tensor:
        around = tf.stack([first, room - first - count])[tf.newaxis]
        return tf.pad(tensor, tf.concat([around, tf.zeros([tensor.shape.rank - 1, 2], tf.int32)], axis=0))

    whole = _sum_lengths([scatter_rows(tf.stop_gradient(_summable(t))) for t in tensors])
    gathered = []
    for tensor, rows in zip(tensors, whole, strict=True):
        rows = tf.cast(rows, tensor.dtype)
        if tensor.dtype.is_floating:
            own = scatter_rows(tensor)
            rows += own - tf.stop_gradient(own)  # adds nothing but the way back
        gathered.append(rows[:total])
    return gathered


def _summable(tensor: tf.Tensor) -> tf.Tensor:
    return tensor if tensor.dtype in REDUCED_AS_THEY_ARE else tf.cast(tensor, tf.int32)


def _sum_lengths(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    context = tf.distribute.get_replica_context()
    return sum_by_type(
        tensors, lambda same: [context.all_reduce(tf.distribute.ReduceOp.SUM, with_device(t)) for t in same]
    )
