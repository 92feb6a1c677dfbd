"""Sums of gradients that travel between the replicas in 16 bits and are added up in float32.

Every replica gets a piece of all gradients from all, adds them in the order of the replicas, and the sums are gathered:
the bytes of a ring at half the size. An addend is rounded once, and a sum once, whatever the number of replicas.
Invariant: every replica gets the same bits, a sum's owner included. What a sum s of x₁ … x_R may be off by is
u · (|s| + Σ |xᵢ|), u = 2⁻⁸ in bfloat16 and 2⁻¹¹ in float16, beside what float32 rounds.

In float16 a row of numbers is multiplied by a power of two, which travels with it: none overflows, and none of at least
2⁻²⁸ of the row's largest loses more than its last bits. (PyTorch's communication hooks and Horovod's compression cast
plainly and add in 16 bits.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.base import Strategy
from tfdist.strategies.ordered_sum import as_rows, of_rows, packs
from tfdist.strategies.sparse import Gradient, without_repeats

BFLOAT16, FLOAT16 = "bfloat16", "float16"
PRECISIONS = (BFLOAT16, FLOAT16)
NUM_BYTES = 2
HIGHEST = 2.0**14  # power of two of a scaled row's largest magnitude: twice that is still in float16's range
EXPONENT = 0x7F800000  # the bits of a float32 that say its power of two


def sum_gradients(
    strategy: Strategy, gradients: Sequence[Gradient], scalars: Sequence[tf.Tensor], precision: str
) -> tuple[list[Gradient], list[tf.Tensor]]:
    """As `Strategy.sum_gradients`, with float32 gradients in 16 bits; for several replicas.

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
    found = dict(zip(large, summed, strict=True))
    for i in [i for i in small if isinstance(gradients[i], tf.IndexedSlices)]:
        found[i] = _sum_of_slices(strategy, gradients[i], precision)
    dense = [i for i in small if i not in found]
    for pack in packs([NUM_BYTES * math.prod(gradients[i].shape) for i in dense], strategy.bytes_per_pack):
        places = [dense[i] for i in pack]
        tensors = [gradients[i] for i in places]
        rows = as_rows(tensors, strategy.topology.num_replicas)
        words = _summed_words(strategy, rows, precision, name="pieces")
        sums = unpacked(strategy.all_gather(words[0], name="sums"), precision)
        found |= zip(places, of_rows(sums, tensors), strict=True)
    return [found[i] for i in range(len(gradients))], scalars


def packed(rows: tf.Tensor, precision: str) -> tf.Tensor:
    """What float32 rows [n, m] travel as, [n, m + 0 or 2]: float16, which every collective takes, whatever it means."""
    if precision == BFLOAT16:
        return tf.bitcast(tf.cast(rows, tf.bfloat16), tf.float16)
    largest = tf.reduce_max(tf.abs(rows), axis=1, keepdims=True)
    largest = tf.clip_by_value(largest, 2.0**-100, 2.0**127)  # so that its inverse is in float32's range
    power = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(largest, tf.int32), EXPONENT), tf.float32)
    return tf.concat([tf.cast(rows * (HIGHEST / power), tf.float16), tf.bitcast(power, tf.float16)[:, 0]], axis=1)


def unpacked(words: tf.Tensor, precision: str) -> tf.Tensor:
    """The float32 rows of what was received."""
    if precision == BFLOAT16:
        return tf.cast(tf.bitcast(words, tf.bfloat16), tf.float32)
    power = tf.bitcast(words[:, -2:], tf.float32)[:, tf.newaxis]
    return tf.cast(words[:, :-2], tf.float32) * (power / HIGHEST)


def _summed_words(strategy: Strategy, rows: tf.Tensor, precision: str, *, name: str) -> tf.Tensor:
    """The sum of row r over the replicas at replica r, [1, …], rounded and packed."""
    received = unpacked(strategy.all_to_all(packed(rows, precision), name=name), precision)
    return packed(tf.add_n(tf.unstack(received, strategy.topology.num_replicas))[tf.newaxis], precision)


def _sum_of_slices(strategy: Strategy, slices: tf.IndexedSlices, precision: str) -> tf.IndexedSlices:
    """The rows of all replicas, each rounded, summed by index, and rounded again as other sums are."""
    own = without_repeats(slices)
    rows = tf.reshape(own.values, [-1, math.prod(own.values.shape[1:])])
    sent = tf.IndexedSlices(packed(rows, precision), own.indices, own.dense_shape)
    (received,) = strategy.sum_over_replicas([sent])
    rows = tf.reshape(unpacked(received.values, precision), [-1, rows.shape[1]])
    summed = without_repeats(tf.IndexedSlices(rows, received.indices, received.dense_shape))
    values = tf.reshape(unpacked(packed(summed.values, precision), precision), [-1, *slices.values.shape[1:]])
    return tf.IndexedSlices(values, summed.indices, summed.dense_shape)
