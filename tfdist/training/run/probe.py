"""Finds out by a trial whether XLA compiles a pass.

The trial runs on a real batch up to the update, so nothing is learned; what the forward pass moves along
(batch statistics, seeds) is put back. All workers try alike, and agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.base import Strategy
from tfdist.training.step.tracing import traced

REFUSED = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)  # by XLA, of what it cannot compile


def runs(
    strategy: Strategy,
    function: Callable[[dict[str, Any]], tf.Tensor],
    batch: Any,
    *,
    keep: Sequence[keras.Variable],
) -> bool:
    """Whether a function runs on every worker. A collective.

    Args:
      strategy: connected.
      function: of a local batch, called in replica context; returns one number that depends on all that it computes.
      batch: the local batches of one step.
      keep: variables to put back to their values afterwards.
    """
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
