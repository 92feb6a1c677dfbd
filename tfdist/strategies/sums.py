"""Sums over the replicas in other ways than `Strategy.sum_gradients`: in one order, in 16 bits, and of rows.

In the first two, every replica gets a piece of all tensors from all replicas, adds the pieces in the order of the
replicas, and the sums are gathered: the bytes of a ring. Invariant: every replica gets the same bits, a sum's owner
included.

**In one order** the bits do not depend on the number of replicas. What is summed are V parts, of which replica r of R
has added up r, r + R, r + 2R … as a tree that adds the upper half of a list to its lower half. The replicas' sums are
added in the same way: together it is one tree over the V parts, whatever R is. (Li et al., "EasyScale: Elastic Training
with Consistent Accuracy", 2023, for PyTorch.)

**In 16 bits** half as much travels, and is added up in float32. An addend is rounded once, and a sum once, whatever the
number of replicas. What a sum s of x₁ … x_R may be off by is u · (|s| + Σ |xᵢ|), u = 2⁻⁸ in bfloat16 and 2⁻¹¹ in
float16, beside what float32 rounds. In float16 a row of numbers is multiplied by a power of two, which travels with it:
none overflows, and none of at least 2⁻²⁸ of the row's largest loses more than its last bits.

**Rows** of all replicas are gathered for what has to see a whole global batch. A gradient flows back to a replica's own
rows alone, so gradients of what each computes from the whole add up to that of one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.strategy import (
    Gradient,
    Strategy,
    num_replicas,
    replica_index,
    sum_by_type,
    sum_repeated_rows,
    with_device,
)

BFLOAT16, FLOAT16 = "bfloat16", "float16"
PRECISIONS = (BFLOAT16, FLOAT16)
NUM_BYTES = 2
HIGHEST = 2.0**14  # power of two of a scaled row's largest magnitude: twice that is still in float16's range
EXPONENT = 0x7F800000  # the bits of a float32 that say its power of two


def ordered_sum(strategy: Strategy, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sum of each tensor over the replicas, a power of two of them, on every replica. In replica context.

    Args:
      strategy: connected.
      tensors: floating, of static shapes.
    """
    if strategy.topology.num_replicas == 1:
        return list(tensors)
    return sum_by_type(tensors, lambda same: _ordered_sum_of_one_type(strategy, same))


def ordered_sum_of_vector(strategy: Strategy, vector: tf.Tensor) -> tf.Tensor:
    """Sums one vector as `ordered_sum` does, so short that one collective to all is quicker than two."""
    return _tree(strategy.all_gather(vector, name="short"), strategy.topology.num_replicas)


def _ordered_sum_of_one_type(strategy: Strategy, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    count, kind = strategy.topology.num_replicas, tensors[0].dtype.name
    parts = strategy.all_to_all(join_rows(tensors, count), name=f"parts.{kind}")
    return split_rows(strategy.all_gather(_tree(parts, count), name=f"sums.{kind}"), tensors)


def _tree(rows: tf.Tensor, count: int) -> tf.Tensor:
    """Sums `count` rows, a power of two, as a binary tree."""
    while count > 1:
        lower, upper = tf.split(rows, 2)
        rows, count = lower + upper, count // 2
    return rows[0]


def pack_indices(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Indices of tensors of these sizes in packs of about `most`, or one of all where that is 0.

    The last come first: scalars, which everything waits for, and the gradients that a backward pass has first.
    """
    packs: list[list[int]] = []
    room = 0
    for index in reversed(range(len(sizes))):
        if room <= 0:
            packs.append([])
            room = most or sum(sizes) + 1
        packs[-1].append(index)
        room -= sizes[index]
    return packs


def join_rows(tensors: Sequence[tf.Tensor], count: int) -> tf.Tensor:
    """Tensors of one type one after the other, and zeros, in so many rows."""
    missing = -sum(math.prod(t.shape) for t in tensors) % count
    parts = [*(tf.reshape(t, [-1]) for t in tensors), tf.zeros([missing], tensors[0].dtype)]
    return tf.reshape(tf.concat(parts, axis=0), [count, -1])


def split_rows(rows: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Splits rows of `join_rows` into the tensors that they hold."""
    *parts, _ = tf.split(tf.reshape(rows, [-1]), [*(math.prod(t.shape) for t in tensors), -1])
    return [tf.reshape(part, t.shape) for part, t in zip(parts, tensors, strict=True)]


def sum_in_16_bits(
    strategy: Strategy, gradients: Sequence[Gradient], scalars: Sequence[tf.Tensor], precision: str
) -> tuple[list[Gradient], list[tf.Tensor]]:
    """Sums float32 gradients of several replicas in 16 bits; else as `Strategy.sum_gradients`.

    Args:
      strategy: connected.
      gradients: of static shapes; `tf.IndexedSlices` only where the strategy gathers rows.
      scalars: stay as they are.
      precision: one of `PRECISIONS`.
    """
    small = [i for i, g in enumerate(gradients) if g.dtype == tf.float32]
    large = [i for i, g in enumerate(gradients) if g.dtype != tf.float32]
    # Collectives of MultiWorker are done in this order, and the scalars are there first.
    summed, scalars = strategy.sum_gradients([gradients[i] for i in large], scalars)
    sums_by_index = dict(zip(large, summed, strict=True))
    for i in [i for i in small if isinstance(gradients[i], tf.IndexedSlices)]:
        sums_by_index[i] = _sum_of_slices(strategy, gradients[i], precision)
    dense = [i for i in small if i not in sums_by_index]
    for indices in pack_indices([NUM_BYTES * math.prod(gradients[i].shape) for i in dense], strategy.bytes_per_pack):
        positions = [dense[i] for i in indices]
        tensors = [gradients[i] for i in positions]
        rows = join_rows(tensors, strategy.topology.num_replicas)
        words = _summed_words(strategy, rows, precision, name="pieces")
        sums = unpack(strategy.all_gather(words[0], name="sums"), precision)
        sums_by_index |= zip(positions, split_rows(sums, tensors), strict=True)
    return [sums_by_index[i] for i in range(len(gradients))], scalars


def pack(rows: tf.Tensor, precision: str) -> tf.Tensor:
    """Packs float32 rows [n, m] as [n, m + 0 or 2]: float16, which every collective takes, whatever it means."""
    if precision == BFLOAT16:
        return tf.bitcast(tf.cast(rows, tf.bfloat16), tf.float16)
    largest = tf.reduce_max(tf.abs(rows), axis=1, keepdims=True)
    largest = tf.clip_by_value(largest, 2.0**-100, 2.0**127)  # so that its inverse is in float32's range
    power = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(largest, tf.int32), EXPONENT), tf.float32)
    return tf.concat([tf.cast(rows * (HIGHEST / power), tf.float16), tf.bitcast(power, tf.float16)[:, 0]], axis=1)


def unpack(words: tf.Tensor, precision: str) -> tf.Tensor:
    """The float32 rows of what was received."""
    if precision == BFLOAT16:
        return tf.cast(tf.bitcast(words, tf.bfloat16), tf.float32)
    power = tf.bitcast(words[:, -2:], tf.float32)[:, tf.newaxis]
    return tf.cast(words[:, :-2], tf.float32) * (power / HIGHEST)


def _summed_words(strategy: Strategy, rows: tf.Tensor, precision: str, *, name: str) -> tf.Tensor:
    """The sum of row r over the replicas at replica r, [1, …], rounded and packed."""
    received = unpack(strategy.all_to_all(pack(rows, precision), name=name), precision)
    return pack(tf.add_n(tf.unstack(received, strategy.topology.num_replicas))[tf.newaxis], precision)


def _sum_of_slices(strategy: Strategy, slices: tf.IndexedSlices, precision: str) -> tf.IndexedSlices:
    """The rows of all replicas, each rounded, summed by index, and rounded again as other sums are."""
    own = sum_repeated_rows(slices)
    rows = tf.reshape(own.values, [-1, math.prod(own.values.shape[1:])])
    sent = tf.IndexedSlices(pack(rows, precision), own.indices, own.dense_shape)
    (received,) = strategy.sum_over_replicas([sent])
    rows = tf.reshape(unpack(received.values, precision), [-1, rows.shape[1]])
    summed = sum_repeated_rows(tf.IndexedSlices(rows, received.indices, received.dense_shape))
    values = tf.reshape(unpack(pack(summed.values, precision), precision), [-1, *slices.values.shape[1:]])
    return tf.IndexedSlices(values, summed.indices, summed.dense_shape)


REDUCED_AS_THEY_ARE = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)


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

    summable = [t if t.dtype in REDUCED_AS_THEY_ARE else tf.cast(t, tf.int32) for t in tensors]
    whole = _sum_lengths([scatter_rows(tf.stop_gradient(t)) for t in summable])
    gathered = []
    for tensor, rows in zip(tensors, whole, strict=True):
        rows = tf.cast(rows, tensor.dtype)
        if tensor.dtype.is_floating:
            own = scatter_rows(tensor)
            rows += own - tf.stop_gradient(own)  # adds nothing but the way back
        gathered.append(rows[:total])
    return gathered


def _sum_lengths(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    context = tf.distribute.get_replica_context()
    return sum_by_type(
        tensors, lambda same: [context.all_reduce(tf.distribute.ReduceOp.SUM, with_device(t)) for t in same]
    )
