"""Settles by trying what cannot be known beforehand: how to pack gradients, and whether XLA compiles a model.

A variant is timed on a real batch up to the update, so nothing is learned; what the forward pass moves along
(batch statistics, seeds) is put back. All workers try alike and follow the sum of their times.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdist.strategies.base import Strategy
from tfdist.training.step.tracing import traced

Choice = TypeVar("Choice")
TIMED_RUNS = 5
REFUSED = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)  # by XLA, of what it cannot compile


def quickest(
    strategy: Strategy,
    variants: Mapping[Choice, Callable[[dict[str, Any]], tf.Tensor]],
    batch: Any,
    *,
    keep: Sequence[keras.Variable],
) -> tuple[Choice, dict[Choice, float]]:
    """The variant whose run takes the least time, and the seconds of each over all workers.

    Args:
      strategy: connected.
      variants: functions of a local batch, called in replica context, that return one number which depends on
        everything they compute. One that TensorFlow refuses to compile counts as infinitely slow.
      batch: the local batches of one step.
      keep: variables to put back to their values afterwards.
    """
    seconds = {}
    with _kept(keep):
        for choice, function in variants.items():
            mine = _seconds(strategy, function, batch)
            seconds[choice] = float(strategy.sum_over_workers([mine])[0])
    return min(seconds, key=seconds.__getitem__), seconds


def runs(
    strategy: Strategy,
    function: Callable[[dict[str, Any]], tf.Tensor],
    batch: Any,
    *,
    keep: Sequence[keras.Variable],
) -> bool:
    """Whether such a function runs on every worker; arguments as `quickest` has them."""
    with _kept(keep):
        try:
            traced(lambda b: strategy.first_local(strategy.run(function, args=(b,))))(batch).numpy()
        except REFUSED:
            return not strategy.any_worker(True)
        return not strategy.any_worker(False)


@contextlib.contextmanager
def _kept(variables: Sequence[keras.Variable]) -> Iterator[None]:
    before = [keras.ops.convert_to_numpy(v) for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def _seconds(strategy: Strategy, function: Callable[[dict[str, Any]], tf.Tensor], batch: Any) -> float:
    run = traced(lambda b: strategy.first_local(strategy.run(function, args=(b,))))
    try:
        run(batch).numpy()
    except REFUSED:
        return math.inf
    times = []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        run(batch).numpy()
        times.append(time.perf_counter() - started)
    return min(times)
