"""Several sources mixed by weight, and weights that change in the course of a run.

Invariant: which source the example at a position comes from, and which of that source's examples it is, is a pure
function of (weights, seed, position in the run), whatever the number of workers. After any number of examples every
source has given its share of them but for less than one example a source. Each source goes through its own epochs,
with another order each, at the pace of its share. The order of the sources is regular, so that every replica's part of
a batch holds its share of each.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.source import Order, Reader, Source, describe_structure, example_seeds
from tfdist.errors import UserError, is_whole_number
from tfdist.settings.checks import COUNT, number, or_none

# Keeps the orders of the sources apart from each other and from the run's own.
_SEED_STRIDE = 1_000_003
# Shares as fractions: times a position of the run they must stay below 2**63.
MAX_PARTS = 10**6

WEIGHT = number(0, sys.float_info.max)
Weights = tuple[float, ...]


class Mixture(Source):
    """Examples of several sources. In a gin file:

        train.train_data = @mixture.Mixture
        mixture.Mixture.sources = [@a/array_files.ArrayFiles, @b/array_files.ArrayFiles]
        mixture.Mixture.weights = {0: (1, 1), 5: (1, 3)}  # from epoch 5 on three of the second to one of the first

    Args:
      sources: data functions or sources; their examples must look alike.
      weights: one number a source, in any unit; or a dict of them by the epoch from which they hold.
      examples_per_epoch: None takes the sum of the sources'.

    Raises:
      UserError: the weights fit no sources, or the sources do not look alike.
    """

    def __init__(
        self,
        sources: Sequence[Callable[[], Any] | Source],
        *,
        weights: Sequence[float] | Mapping[int, Sequence[float]] | None = None,
        examples_per_epoch: int | None = None,
    ) -> None:
        if isinstance(sources, (str, Mapping)) or not isinstance(sources, Sequence) or not sources:
            raise UserError(
                f"Mixture.sources is a list of data functions, [@a/my.data, @b/my.data]; received {sources!r}."
            )
        or_none(COUNT)("Mixture.examples_per_epoch", examples_per_epoch)
        self._sources = [as_source(source) for source in sources]
        self.structure = _common_structure(self._sources)
        self.calls_python = any(source.calls_python for source in self._sources)
        self.waits = any(source.waits for source in self._sources)
        self.file_sizes = tuple(size for source in self._sources for size in source.file_sizes)
        chosen = [1.0] * len(self._sources) if weights is None else weights
        self._weights = _check_weights(chosen, len(self._sources))
        self.num_examples = examples_per_epoch or sum(source.num_examples for source in self._sources)

    def prepare(self, directory: str) -> None:
        """Prepares every source."""
        for source in self._sources:
            source.prepare(directory)

    def reader(self, order: Order) -> Reader:
        """Reads from each source the examples that its quota gives it."""
        begins = tuple(epoch * self.num_examples for epoch in self._weights)
        quotas = Quotas(begins, tuple(self._weights.values()))
        shares = quotas.shares()
        reads = []
        for index, (source, share) in enumerate(zip(self._sources, shares, strict=True)):
            seed = None if order.seed is None else (order.seed + (index + 1) * _SEED_STRIDE) & 0x7FFFFFFF
            own = Order(batch_size=max(1, round(order.batch_size * share)), seed=seed)
            reads.append(_build_running_reader(source, own, self.structure))

        def read(positions: tf.Tensor, epoch: tf.Tensor) -> Any:
            chosen, ranks = quotas.locate(epoch * self.num_examples + positions)
            found = [each(tf.boolean_mask(ranks, chosen == index)) for index, each in enumerate(reads)]
            together = tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *found)
            return _restore_order(together, chosen)

        return read

    def describe(self) -> list[str]:
        """Lists the weights, and describes every source."""
        by_epoch = ", ".join(f"{epoch}: {weights}" for epoch, weights in self._weights.items())
        lines = [f"a mixture of {len(self._sources)} sources, weights from epoch {by_epoch}"]
        return lines + [f"  {line}" for source in self._sources for line in source.describe()]


def _check_weights(weights: Any, num_sources: int) -> dict[int, Weights]:
    """The weights by the epoch from which they hold, in order; raises UserError where they are none."""
    given = weights if isinstance(weights, Mapping) else {0: weights}
    if 0 not in given or not all(is_whole_number(epoch, least=0) for epoch in given):
        raise UserError(
            f"Mixture.weights by epoch begins with an entry for 0, such as {{0: (1, 1), 5: (1, 3)}}; received "
            f"{weights!r}."
        )
    for each in given.values():
        fits = isinstance(each, Sequence) and not isinstance(each, str) and len(each) == num_sources
        if not fits or not all(map(WEIGHT.accepts, each)) or not sum(each):
            raise UserError(
                f"Mixture.weights are {num_sources} numbers from 0 on, one a source and not all 0; received {each!r}."
            )
    return {epoch: tuple(map(float, given[epoch])) for epoch in sorted(given)}


@dataclasses.dataclass(frozen=True)
class Quotas:
    """The number of examples that each source has given by any position of a run.

    The counts never fall, add up to the number of positions, and are computed for any position at once, in integers: of
    a segment with constant weights the first source gets floor(share · n) of n positions, of those left the second gets
    floor(its share of the rest · left), and so on. As every such share is at most 1, no count falls.

    Args:
      begins: the first position of every segment of constant weights, the first one 0.
      weights: of each segment.
    """

    begins: tuple[int, ...]
    weights: tuple[Weights, ...]

    def shares(self) -> list[float]:
        """The part of the first segment's examples that each source gives."""
        return [weight / sum(self.weights[0]) for weight in self.weights[0]]

    def counts(self, positions: tf.Tensor) -> tf.Tensor:
        """int64 [n, sources]: how many examples each source gives before each of the positions, int64 [n]."""
        begins = tf.constant(self.begins, tf.int64)
        segment = tf.searchsorted(begins, positions, side="right") - 1
        above, below = (tf.transpose(tf.gather(part, segment)) for part in self._fractions)
        split = _split_count(positions - tf.gather(begins, segment), tf.unstack(above), tf.unstack(below))
        return tf.gather(self._starts, segment) + tf.stack(split, axis=1)

    def locate(self, positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The source of each position, and how many examples it has given before: both int64 [n]."""
        before = self.counts(positions)
        chosen = tf.argmax(self.counts(positions + 1) - before, axis=1)
        return chosen, tf.gather(before, chosen, batch_dims=1)

    @functools.cached_property
    def _fractions(self) -> tuple[np.ndarray, np.ndarray]:
        """Each source's share of what those before it left, as int64 [segments, sources]: above and below the line."""
        found = [[_compute_share(weights, index) for index in range(len(weights))] for weights in self.weights]
        above = np.array([[f.numerator for f in row] for row in found], np.int64)
        return above, np.array([[f.denominator for f in row] for row in found], np.int64)

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """The examples that each source has given before a segment, int64 [segments, sources]."""
        above, below = (part.tolist() for part in self._fractions)
        lengths = np.diff(self.begins).tolist()
        counts = [_split_count(length, *rates) for length, *rates in zip(lengths, above, below, strict=False)]
        return np.cumsum([[0] * len(above[0]), *counts], axis=0, dtype=np.int64)


def _split_count(positions: Any, above: Sequence[Any], below: Sequence[Any]) -> list[Any]:
    """A number of positions, or a tensor of them, split among the sources."""
    left, counts = positions, []
    for up, down in zip(above, below, strict=True):
        counts.append(left * up // down)
        left = left - counts[-1]
    return counts


def _compute_share(weights: Weights, index: int) -> Fraction:
    rest = sum(map(Fraction, weights[index:]))
    if not rest:
        return Fraction(0)
    if index == len(weights) - 1 or not any(weights[index + 1 :]):
        return Fraction(1)
    return (Fraction(weights[index]) / rest).limit_denominator(MAX_PARTS)


def _build_running_reader(source: Source, order: Order, structure: Any) -> Callable[[tf.Tensor], Any]:
    """Reads the examples of a source at int64 [n] running positions, which run on over its epochs."""
    read = source.reader(order)

    def read_one_epoch(positions: tf.Tensor, epoch: tf.Tensor) -> Any:
        examples = read(positions, epoch)
        if source.augment is not None and order.seed is not None:
            examples = source.augment(examples, example_seeds(positions, epoch, order.seed))
        return tf.nest.map_structure(lambda part, spec: tf.ensure_shape(part, spec.shape), examples, structure)

    def read_running(ranks: tf.Tensor) -> Any:
        """Reads examples by their numbers in all epochs one after the other, int64 [n]."""
        epochs, positions = ranks // source.num_examples, ranks % source.num_examples
        nothing = tf.nest.map_structure(lambda spec: tf.zeros([0, *spec.shape[1:]], spec.dtype), structure)
        own_epochs = tf.unique(tf.sort(epochs)).y  # ranks of other replicas may lie in epochs between these

        def one_epoch(turn: tf.Tensor, before: Any) -> tuple[tf.Tensor, Any]:
            epoch = own_epochs[turn]
            found = read_one_epoch(tf.boolean_mask(positions, epochs == epoch), epoch)
            return turn + 1, tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), before, found)

        _, found = tf.while_loop(
            lambda turn, _: turn < tf.size(own_epochs),
            one_epoch,
            (tf.constant(0), nothing),
            shape_invariants=(tf.TensorShape([]), tf.nest.map_structure(lambda spec: spec.shape, structure)),
            parallel_iterations=1,
        )
        return _restore_order(found, epochs)

    return read_running


def _restore_order(grouped: Any, keys: tf.Tensor) -> Any:
    """Rows that lie by ascending key, and within a key in order, at the positions that the keys have."""
    positions = tf.argsort(tf.argsort(keys, stable=True), stable=True)
    return tf.nest.map_structure(lambda part: tf.gather(part, positions), grouped)


def _common_structure(sources: Sequence[Source]) -> Any:
    described = [describe_structure(source.structure) for source in sources]
    first = described[0]
    for index, other in enumerate(described):
        if other != first:
            raise UserError(
                f"The sources of a mixture must look alike: source 0 gives {first}, source {index} {other}."
            )
    for spec in tf.nest.flatten(sources[0].structure):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape[1:].is_fully_defined():
            raise UserError(f"A mixture needs examples of fixed shapes; received {first}. Pad them to one length.")
    return sources[0].structure
