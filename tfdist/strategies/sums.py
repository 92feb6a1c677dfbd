"""Sums over the replicas in other ways than `Strategy.sum_gradients`: in one order, in 16 bits, and of rows.

In the first two, every replica gets a piece of all tensors from all replicas, adds the pieces in the order of the
replicas, and the sums are gathered: the bytes of a ring. Invariant: every replica gets the same bits, a sum's owner
included.

**In one order** the bits do not depend on the number of replicas. What is summed are V parts, the leaves of one binary
tree. Each replica has some neighbours and adds them up as far as the tree goes; what it has then are a few nodes of the
tree, from which the other sums are made. (Li et al., "EasyScale: Elastic Training with Consistent Accuracy", 2023, for
PyTorch.)

**In 16 bits** half as much travels, and is added up in float32. An addend is rounded once, and a sum once, whatever the
number of replicas. What a sum s of x₁ … x_R may be off by is u · (|s| + Σ |xᵢ|), u = 2⁻⁸ in bfloat16 and 2⁻¹¹ in
float16, beside what float32 rounds. In float16 a row of numbers is multiplied by a power of two, which travels with it:
none overflows, and none of at least 2⁻²⁸ of the row's largest loses more than its last bits.

**Rows** of all replicas are gathered for what has to see a whole global batch. A gradient flows back to a replica's own
rows alone, so gradients of what each computes from the whole add up to that of one device.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from tfdist.strategies.strategy import (
    Gradient,
    Strategy,
    num_replicas,
    replica_index,
    static_replica_index,
    sum_by_type,
    sum_repeated_rows,
    with_device,
)

T = TypeVar("T")

BFLOAT16, FLOAT16 = "bfloat16", "float16"
PRECISIONS = (BFLOAT16, FLOAT16)
NUM_BYTES = 2
MOST_BYTES = 4 * 2**20  # of an ordered sum, so that TensorFlow's memory for it is used again in each step
HIGHEST = 2.0**14  # power of two of a scaled row's largest magnitude: twice that is still in float16's range
EXPONENT = 0x7F800000  # the bits of a float32 that say its power of two


class Node(NamedTuple, Generic[T]):
    """A node of the tree over the parts of a batch: the number of its first part, how many it has, and their sum."""

    first: int
    size: int
    value: T


def add_as_tree(nodes: Iterable[Node[T]], add: Callable[[T, T], T]) -> list[Node[T]]:
    """Adds up nodes that lie side by side, each with its neighbour as soon as both are there: fewer are held at once.

    Returns:
      The nodes that are left, since their neighbours in the tree are not among `nodes`.
    """
    held: list[Node[T]] = []
    for node in nodes:
        held.append(node)
        while len(held) > 1 and held[-2].size == held[-1].size and held[-2].first % (2 * node.size) == 0:
            right, left = held.pop(), held.pop()
            node = Node(left.first, 2 * left.size, add(left.value, right.value))
            held.append(node)
    return held


def ordered_sum(strategy: Strategy, nodes: Sequence[Sequence[tf.Tensor]], spans: Sequence[range]) -> list[tf.Tensor]:
    """The sum of each tensor over all parts, on every replica. In replica context.

    Args:
      strategy: connected.
      nodes: floating tensors of static shapes, of each node that `add_as_tree` has left of this replica's parts.
      spans: the parts of each replica.
    """
    if len(spans) == 1:
        return [functools.reduce(tf.add, values) for values in zip(*nodes, strict=True)]
    layout = _list_nodes(spans)
    stacks = [_stack_nodes(values, layout) for values in zip(*nodes, strict=True)]
    sizes = [stack.dtype.size * math.prod(stack.shape) for stack in stacks]
    sums: dict[int, tf.Tensor] = {}
    for indices in pack_indices(sizes, strategy.bytes_per_pack or MOST_BYTES):
        pack = [stacks[i] for i in indices]
        sums |= zip(indices, sum_by_type(pack, lambda same: _sum_stacks(strategy, same, layout)), strict=True)
    return [sums[i] for i in range(len(stacks))]


def ordered_sum_of_vector(strategy: Strategy, parts: Sequence[tf.Tensor], spans: Sequence[range]) -> tf.Tensor:
    """Sums a vector of each of this replica's parts, so short that one collective to all is quicker than two."""
    own, layout = spans[static_replica_index()], _list_nodes(spans)
    nodes = add_as_tree(map(Node, own, itertools.repeat(1), parts), tf.add)
    stack = _stack_nodes([node.value for node in nodes], layout)
    return _sum_nodes(strategy.all_gather(tf.reshape(stack, [-1]), name="short"), layout)


Layout: TypeAlias = "list[list[Node[None]]]"  # the nodes of each replica


def _list_nodes(spans: Sequence[range]) -> Layout:
    """The nodes that `add_as_tree` leaves of each replica's parts."""
    return [add_as_tree((Node(part, 1, None) for part in span), lambda left, right: None) for span in spans]


def _stack_nodes(values: Sequence[tf.Tensor], layout: Layout) -> tf.Tensor:
    """One tensor of this replica's nodes, with zeros for those that others have more."""
    room = max(map(len, layout))
    return tf.stack([*values, *[tf.zeros_like(values[0])] * (room - len(values))])


def _sum_stacks(strategy: Strategy, stacks: list[tf.Tensor], layout: Layout) -> list[tf.Tensor]:
    """The sums over all nodes and replicas of `stacks` of one type."""
    count, kind, room = len(layout), stacks[0].dtype.name, stacks[0].shape[0]
    tensors = [[stack[number] for stack in stacks] for number in range(room)]
    rows = tf.stack([join_rows(each, count) for each in tensors], axis=1)
    received = strategy.all_to_all(tf.reshape(rows, [count, -1]), name=f"parts.{kind}")
    total = _sum_nodes(received, layout)
    return split_rows(strategy.all_gather(total, name=f"sums.{kind}"), tensors[0])


def _sum_nodes(received: tf.Tensor, layout: Layout) -> tf.Tensor:
    """Sums what all replicas have of a vector of n numbers, [replicas, nodes · n], up to the root of the tree."""
    room = max(map(len, layout))
    rows = tf.unstack(tf.reshape(received, [len(layout) * room, -1]))
    nodes = [
        node._replace(value=rows[replica * room + number])
        for replica, some in enumerate(layout)
        for number, node in enumerate(some)
    ]
    return functools.reduce(tf.add, [node.value for node in add_as_tree(nodes, tf.add)])


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
