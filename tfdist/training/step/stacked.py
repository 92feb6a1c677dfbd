"""Several steps in one program of XLA, in which a small model's step costs little beside its arithmetic.

The rows of a stack of batches are looked up by their numbers, without an iterator, and the program loops over them. A
batch with fewer rows than the others, at the end of a pass over the data, is a stack of its own. Invariant: which steps
share a program changes nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.sources.source import Order, Source
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy
from tfdist.training.step.precision import can_lower
from tfdist.training.step.state import Learner
from tfdist.training.step.step import Totals, TrainStep, advance_totals

MOST_STEPS, MOST_BYTES = 32, 2**24  # of a stack


def stack_size(strategy: Strategy, learner: Learner, plan: BatchPlan, source: Source) -> int:
    """The number of batches of a stack; 1 where there can be none, or batches are large.

    Args:
      strategy: connected; of one device.
      learner: not sharded.
      plan: of batches that are not cut into parts.
      source: of numbers in memory, which nothing changes.
    """
    is_alone = plan.total_parts == 1 and learner.shards is None and isinstance(strategy, OneDevice)
    specs = tf.nest.flatten(source.structure)
    if not is_alone or not all(map(_is_fixed, specs)) or not _is_in_memory(source):
        return 1
    of_row = sum(spec.dtype.size * math.prod(spec.shape[1:]) for spec in specs)
    return max(1, min(MOST_STEPS, MOST_BYTES // (plan.global_batch_size * of_row)))


def _is_in_memory(source: Source) -> bool:
    return source.augment is None and not source.calls_python and source.arrays_in_memory() is not None


def _is_fixed(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string and spec.shape[1:].is_fully_defined()


class StackedSteps(TrainStep):
    """Runs steps by programs of XLA; pass and update have to be compiled, too.

    Args:
      given: as `TrainStep` takes it.
      size: of a stack, from `stack_size`.
      source: of the examples.
    """

    reads_iterator = False

    def __init__(self, *given: Any, size: int, source: Source, **options: Any) -> None:
        super().__init__(*given, **options)
        plan = self.local.plan
        self._size, self._structure = size, source.structure
        self._read = source.reader(Order(plan.global_batch_size, plan.shuffle_seed))
        self._program = tf.function(self._train_on_stack, jit_compile=True, autograph=False)

    def compiles(self) -> bool:
        """Whether XLA has all that a program needs; nothing is run."""
        given = (self._stack_specs(self._size, self.local.plan.global_batch_size), *self._specs())
        return can_lower(lambda *flat: self._train_on_stack(*tf.nest.pack_sequence_as(given, flat)), given)

    def _stack_specs(self, num_batches: int | None, num_rows: int | None) -> Any:
        return tf.nest.map_structure(
            lambda each: tf.TensorSpec([num_batches, num_rows, *each.shape[1:]], each.dtype),
            {"examples": self._structure},
        )

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

    def _build_step(self, iterator: Iterator[Any], first_step: tf.Tensor, num_steps: tf.Tensor) -> tuple[Any, Any]:
        # While a program trains on one stack, the rows of the next are looked up: no wait for input is counted.
        plan = self.local.plan
        size = plan.global_batch_size
        num_examples = plan.num_examples_until(plan.steps_per_epoch)
        program = self._program.get_concrete_function(self._stack_specs(None, plan.width), *self._specs())

        def stack_rows(rows: tf.Tensor) -> tf.Tensor:  # all stacks are of one shape, for which XLA compiles once
            missing = self._size * size - tf.shape(rows)[0]
            filled = tf.cond(
                tf.equal(missing, 0),
                lambda: rows,
                lambda: tf.pad(rows, [[0, missing], *[[0, 0]] * (rows.shape.rank - 1)]),
            )
            return tf.reshape(filled, [self._size, size, *rows.shape[1:]])

        def look_up(done: tf.Tensor) -> Any:
            """The rows of the next batches when so many steps of the call are done; of one more after the last."""
            count = tf.clip_by_value(num_steps - done, 1, self._size)
            step = first_step + tf.cast(done, tf.int64)
            start = step % plan.steps_per_epoch * size
            end = tf.minimum(start + tf.cast(count, tf.int64) * size, num_examples)
            return self._look_up(tf.range(start, end), step // plan.steps_per_epoch)

        def train_on_stack(totals: Totals, rows: Any, done: tf.Tensor) -> tuple[Totals, Any, tf.Tensor]:
            num_rows = tf.shape(tf.nest.flatten(rows)[0])[0]
            whole = num_rows // size
            done += -(-num_rows // size)
            totals = program(tf.nest.map_structure(stack_rows, rows), totals.steps + whole, totals)
            if plan.width is None:
                last = tf.nest.map_structure(lambda each: each[tf.newaxis, whole * size :], rows)
                trains = (num_rows > whole * size) & self._proceeds(totals, until=num_steps)
                totals = tf.cond(trains, lambda: program(last, totals.steps + 1, totals), lambda: totals)
            return totals, look_up(done), done

        return train_on_stack, [look_up(tf.constant(0)), tf.constant(0)]

    def _look_up(self, positions: tf.Tensor, epoch: tf.Tensor) -> Any:
        with tf.device("CPU:0"):  # where all examples are; another device gets the rows alone
            return {"examples": self._read(positions, epoch)}
