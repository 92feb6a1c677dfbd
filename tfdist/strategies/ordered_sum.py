"""Sums over the replicas whose bits do not depend on how many replicas there are.

What is summed are V parts, of which replica r of R has added up r, r + R, r + 2R … as a tree that adds the upper half
of a list to its lower half. Here the replicas' sums are added in the same way: together it is one tree over the V
parts, whatever R is. The bytes on the wire are those of a ring: every replica gets a slice of all sums, adds them, and
the slices are gathered. (Li et al., "EasyScale: Elastic Training with Consistent Accuracy", 2023, for PyTorch.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.base import Strategy


def ordered_sum(strategy: Strategy, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sum of each tensor over the replicas, a power of two of them, on every replica. In replica context.

    Args:
      strategy: connected.
      tensors: floating, of static shapes.
    """
    if strategy.topology.num_replicas == 1:
        return list(tensors)
    found: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        found |= zip(places, _of_one_type(strategy, [tensors[i] for i in places]), strict=True)
    return [found[i] for i in range(len(tensors))]


def ordered_sum_of_short(strategy: Strategy, vector: tf.Tensor) -> tf.Tensor:
    """The same of one vector so short that it is quicker sent to all at once than in two collectives."""
    return _tree(strategy.all_gather(vector, name="short"), strategy.topology.num_replicas)


def _of_one_type(strategy: Strategy, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    count, kind = strategy.topology.num_replicas, tensors[0].dtype.name
    parts = strategy.all_to_all(as_rows(tensors, count), name=f"parts.{kind}")
    return of_rows(strategy.all_gather(_tree(parts, count), name=f"sums.{kind}"), tensors)


def _tree(rows: tf.Tensor, count: int) -> tf.Tensor:
    """The sum of so many rows."""
    while count > 1:
        lower, upper = tf.split(rows, 2)
        rows, count = lower + upper, count // 2
    return rows[0]


def packs(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Places of tensors of these sizes in packs of about `most`, or one of all where that is 0.

    The last come first: scalars, which everything waits for, and the gradients that a backward pass has first.
    """
    found: list[list[int]] = []
    room = 0
    for place in reversed(range(len(sizes))):
        if room <= 0:
            found.append([])
            room = most or sum(sizes) + 1
        found[-1].append(place)
        room -= sizes[place]
    return found


def as_rows(tensors: Sequence[tf.Tensor], count: int) -> tf.Tensor:
    """Tensors of one type one after the other, and zeros, in so many rows."""
    missing = -sum(math.prod(t.shape) for t in tensors) % count
    parts = [*(tf.reshape(t, [-1]) for t in tensors), tf.zeros([missing], tensors[0].dtype)]
    return tf.reshape(tf.concat(parts, axis=0), [count, -1])


def of_rows(rows: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What stands in such rows in the places of the tensors."""
    *parts, _ = tf.split(tf.reshape(rows, [-1]), [*(math.prod(t.shape) for t in tensors), -1])
    return [tf.reshape(part, t.shape) for part, t in zip(parts, tensors, strict=True)]
