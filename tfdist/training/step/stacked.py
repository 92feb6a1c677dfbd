"""Several steps in one program of XLA, in which a small model's step costs little beside its arithmetic.

TensorFlow stacks batches, and the program loops over them, so that a stack is held twice. A batch with fewer rows than
the others, at the end of a pass over the data, is a stack of its own. Invariant: which steps share a program changes
nothing, and no batch is taken from the iterator beyond those that the call trains on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.sources.source import Source
from tfdist.data.sources.user_dataset import StreamSource
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy
from tfdist.training.step.precision import can_lower
from tfdist.training.step.state import Learner
from tfdist.training.step.step import Totals, TrainStep, advance_totals
from tfdist.training.watch.waiting import time_input

MOST_STEPS, MOST_BYTES = 32, 2**24  # of a stack


def stack_size(strategy: Strategy, learner: Learner, plan: BatchPlan, source: Source) -> int:
    """The number of batches of a stack; 1 where there can be none, or batches are large.

    Args:
      strategy: connected; of one device.
      learner: not sharded.
      plan: of batches that are not cut into parts.
      source: of numbers in one shape.
    """
    is_alone = plan.total_parts == 1 and learner.shards is None and isinstance(strategy, OneDevice)
    specs = tf.nest.flatten(source.structure)
    if not is_alone or isinstance(source, StreamSource) or not all(map(_is_fixed, specs)):
        return 1  # a stream's batches may be of any size
    of_row = sum(spec.dtype.size * math.prod(spec.shape[1:]) for spec in specs)
    return max(1, min(MOST_STEPS, MOST_BYTES // (plan.global_batch_size * of_row)))


def _is_fixed(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string and spec.shape[1:].is_fully_defined()


class StackedSteps(TrainStep):
    """Runs steps by programs of XLA; pass and update have to be compiled, too.

    Args:
      given: as `TrainStep` takes it.
      size: of a stack, from `stack_size`.
    """

    def __init__(self, *given: Any, size: int, **options: Any) -> None:
        super().__init__(*given, **options)
        self._size = size
        self._program = tf.function(self._train_on_stack, jit_compile=True, autograph=False)

    def compiles(self, batch: Any) -> bool:
        """Whether XLA has all that a program needs; nothing is run."""
        stack = tf.nest.map_structure(lambda each: tf.TensorSpec([self._size, *each.shape], each.dtype), batch)
        given = (stack, *self._specs())
        return can_lower(lambda *flat: self._train_on_stack(*tf.nest.pack_sequence_as(given, flat)), given)

    def _specs(self) -> tuple[tf.TensorSpec, Totals]:
        """Of the step until which a program trains, and of the totals."""
        count, seconds = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.float64)
        sums, norm = tf.TensorSpec([3 + len(self.term_names)], tf.float64), tf.TensorSpec([], tf.float32)
        return count, Totals(sums, count, count, norm, seconds, seconds)

    def _train_on_stack(self, stack: Any, until: tf.Tensor, begin: Totals) -> Totals:
        def step(totals: Totals) -> tuple[Totals]:
            # A slice would have XLA compile anew for each of its indices.
            batch = tf.nest.map_structure(lambda each: tf.gather(each, totals.steps - begin.steps), stack)
            return (advance_totals(totals, self.on_batch(batch), tf.constant(0.0, tf.float64)),)

        proceeds = functools.partial(self._proceeds, until=until)
        (totals,) = tf.while_loop(proceeds, step, [begin], parallel_iterations=1)
        return totals

    def _build_step(self, iterator: Iterator[Any], num_steps: tf.Tensor) -> Callable[[Totals], tuple[Totals]]:
        spec = iterator.element_spec  # type: ignore[attr-defined]
        size = self.local.plan.global_batch_size
        stacks = tf.nest.map_structure(lambda each: tf.TensorSpec([None, *each.shape], each.dtype), spec)
        program = self._program.get_concrete_function(stacks, *self._specs())

        def stack_rows(rows: tf.Tensor) -> tf.Tensor:  # all stacks are of one shape, for which XLA compiles once
            missing = self._size * size - tf.shape(rows)[0]
            filled = tf.pad(rows, [[0, missing], *[[0, 0]] * (rows.shape.rank - 1)])
            return tf.reshape(filled, [self._size, size, *rows.shape[1:]])

        def train_on_stack(totals: Totals) -> tuple[Totals]:
            until = tf.minimum(num_steps, totals.steps + self._size)
            rows, waited = self._take_batches(iterator, spec, until - totals.steps)
            num_rows = tf.shape(tf.nest.flatten(rows)[0])[0]
            whole = num_rows // size
            stack = tf.nest.map_structure(stack_rows, rows)
            totals = totals._replace(input_seconds=totals.input_seconds + waited)
            totals = program(stack, totals.steps + whole, totals)
            if self.local.plan.width is None:
                last = tf.nest.map_structure(lambda each: each[tf.newaxis, whole * size :], rows)
                trains = (num_rows > whole * size) & self._proceeds(totals, until)
                totals = tf.cond(trains, lambda: program(last, totals.steps + 1, totals), lambda: totals)
            return (totals,)

        return train_on_stack

    def _take_batches(self, iterator: Iterator[Any], spec: Any, most: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """The rows of batches up to `most`, or to one with fewer rows than others; and the seconds waited."""
        size = self.local.plan.global_batch_size
        arrays = [
            tf.TensorArray(each.dtype, 0, dynamic_size=True, element_shape=[None, *each.shape[1:]])
            for each in tf.nest.flatten(spec)
        ]

        def goes_on(count: tf.Tensor, rows: tf.Tensor, *_: Any) -> tf.Tensor:
            return (count < most) & tf.equal(rows, size)

        def take_batch(count: tf.Tensor, _: Any, *arrays: tf.TensorArray) -> tuple[Any, ...]:
            parts = tf.nest.flatten(next(iterator))
            written = [array.write(count, each) for array, each in zip(arrays, parts, strict=True)]
            return count + 1, tf.shape(parts[0])[0], *written

        def take() -> list[Any]:
            begin = [tf.constant(0), tf.constant(size), *arrays]
            _, _, *filled = tf.while_loop(goes_on, take_batch, begin, parallel_iterations=1)
            return [array.concat() for array in filled]

        rows, waited = time_input(self._strategy, take)
        return tf.nest.pack_sequence_as(spec, rows), waited
