"""How many examples each source of a mixture has given by any place of a run.

Invariant: the counts are whole, never fall, and add up to the number of places; in each segment each differs from its
share by less than the number of sources. They are computed for any place at once, in whole numbers: of a segment with
constant weights the first source gets floor(share · n) of n places, of those left the second gets floor(its share of
the rest · left), and so on. As every such share is at most 1, no count falls. Used by `mixture.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import UserError, is_whole_number

# Shares as fractions: times a place of the run they must stay below 2**63.
MOST_PARTS = 10**6

Weights = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Weights by the epoch from which they hold; the first entry is for 0."""

    points: tuple[tuple[int, Weights], ...]

    @classmethod
    def of(cls, weights: Any, *, num_sources: int) -> Schedule:
        """Raises UserError where `weights` are none."""
        given = weights if isinstance(weights, Mapping) else {0: weights}
        if 0 not in given or not all(is_whole_number(begin, least=0) for begin in given):
            raise UserError(
                f"Mixture.weights by epoch begins with an entry for 0, such as {{0: (1, 1), 5: (1, 3)}}; received "
                f"{weights!r}."
            )
        for each in given.values():
            _check_weights(each, num_sources)
        return cls(tuple((begin, tuple(map(float, given[begin]))) for begin in sorted(given)))

    def said(self) -> str:
        if len(self.points) == 1:
            return str(self.points[0][1])
        return "changing with the epoch: " + ", ".join(f"{begin}: {weights}" for begin, weights in self.points)

    def quotas(self, num_examples: int) -> Quotas:
        """The counts for epochs of `num_examples` places."""
        return Quotas(
            tuple(begin * num_examples for begin, _ in self.points), tuple(weights for _, weights in self.points)
        )


@dataclasses.dataclass(frozen=True)
class Quotas:
    """The counts of the sources over the places of a run.

    Args:
      begins: the first place of every segment of constant weights, the first one 0.
      weights: of each segment.
    """

    begins: tuple[int, ...]
    weights: tuple[Weights, ...]

    def shares(self) -> list[float]:
        """The part of the first segment's examples that each source gives."""
        return [weight / sum(self.weights[0]) for weight in self.weights[0]]

    def counts(self, places: tf.Tensor) -> tf.Tensor:
        """int64 [n, sources]: how many examples each source gives before each of the places, int64 [n]."""
        begins = tf.constant(self.begins, tf.int64)
        segment = tf.searchsorted(begins, places, side="right") - 1
        above, below = (tf.transpose(tf.gather(part, segment)) for part in self._fractions)
        split = _split(places - tf.gather(begins, segment), tf.unstack(above), tf.unstack(below))
        return tf.gather(self._starts, segment) + tf.stack(split, axis=1)

    def places(self, places: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The source of each place, and how many examples it has given before: both int64 [n]."""
        before = self.counts(places)
        chosen = tf.argmax(self.counts(places + 1) - before, axis=1)
        return chosen, tf.gather(before, chosen, batch_dims=1)

    @functools.cached_property
    def _fractions(self) -> tuple[np.ndarray, np.ndarray]:
        """Each source's share of what those before it left, as int64 [segments, sources]: above and below the line."""
        found = [[_share(weights, index) for index in range(len(weights))] for weights in self.weights]
        above = np.array([[f.numerator for f in row] for row in found], np.int64)
        return above, np.array([[f.denominator for f in row] for row in found], np.int64)

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """What each source has given before a segment, int64 [segments, sources]."""
        above, below = (part.tolist() for part in self._fractions)
        lengths = np.diff(self.begins).tolist()
        counts = [_split(length, *rates) for length, *rates in zip(lengths, above, below, strict=False)]
        return np.cumsum([[0] * len(above[0]), *counts], axis=0, dtype=np.int64)


def _split(places: Any, above: Sequence[Any], below: Sequence[Any]) -> list[Any]:
    """A number of places, or a tensor of them, split among the sources."""
    left, counts = places, []
    for up, down in zip(above, below, strict=True):
        counts.append(left * up // down)
        left = left - counts[-1]
    return counts


def _share(weights: Weights, index: int) -> Fraction:
    rest = sum(map(Fraction, weights[index:]))
    if not rest:
        return Fraction(0)
    if index == len(weights) - 1 or not any(weights[index + 1 :]):
        return Fraction(1)
    return (Fraction(weights[index]) / rest).limit_denominator(MOST_PARTS)


def _check_weights(weights: Any, num_sources: int) -> None:
    fits = isinstance(weights, Sequence) and not isinstance(weights, str) and len(weights) == num_sources
    if not fits or not all(_is_weight(weight) for weight in weights) or not sum(weights):
        raise UserError(
            f"Mixture.weights are {num_sources} numbers from 0 on, one a source and not all 0; received {weights!r}."
        )


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
