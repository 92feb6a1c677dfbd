"""Functions that are traced side by side, since each needs at some places what all the others have there.

As MirroredStrategy does with its replicas, each is traced on a thread of its own, of which one runs at a time. When all
have come to a `meet`, what they gave there becomes one value, made by the caller's thread, where a strategy's
collectives may be called. Invariant: in every process the same operations are traced in the same order. Called by the
passes over the parts of a batch that a layer looks at as a whole.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf

from tfdist.errors import UserError

T = TypeVar("T")


def side_by_side(functions: Sequence[Callable[[], T]], merge: Callable[[list[tf.Tensor]], tf.Tensor]) -> list[T]:
    """Returns what the functions return. Called while `tf.function` traces, in replica context.

    Args:
      functions: come to the same number of `meet`s.
      merge: makes one tensor of those that the functions gave, in their order; called on this thread.

    Raises:
      BaseException: the first that a function raises.
    """
    tf.compat.v1.get_default_graph().switch_to_thread_local()
    sides = [_Side(function) for function in functions]
    try:
        given = [side.proceed(None) for side in sides]
        while given[0] is not None:
            merged = merge(given)
            given = [side.proceed(merged) for side in sides]
        return [side.result for side in sides]
    finally:
        for side in sides:
            side.stop()


def meet(value: tf.Tensor) -> tf.Tensor:
    """Returns what `merge` makes of this value and of those of the other functions.

    Raises:
      UserError: in a graph of its own, such as a loop's body, whose tensors nobody else can use.
    """
    side = threading.current_thread()
    assert isinstance(side, _Side), "side_by_side() comes first"
    return side.meet(value)


class _WorkerStopped(BaseException):
    """Ends a function that waits in a `meet`, where another one has failed."""


class _Side(threading.Thread, Generic[T]):
    """The thread of one function; attributes are set when it has ended."""

    result: T

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._graph = tf.compat.v1.get_default_graph()
        self._replica = tf.distribute.get_replica_context()
        self._device = tf.no_op().device
        self._given: queue.SimpleQueue[tf.Tensor | None] = queue.SimpleQueue()
        self._merged: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            with self._graph.as_default(), self._replica, tf.device(self._device):
                self.result = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._given.put(None)

    def proceed(self, merged: tf.Tensor | None) -> tf.Tensor | None:
        """Lets it run until it meets the others, with what it gives there, or until it ends: None."""
        if merged is None:
            self.start()
        else:
            self._merged.put(merged)
        given = self._given.get()
        if self._error is not None:
            raise self._error
        return given

    def meet(self, value: tf.Tensor) -> tf.Tensor:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise UserError(
                "train.deterministic, with a number of replicas, takes batch statistics over all parts of a batch. A "
                "layer wants them within a loop or a branch (an RNN's cell, tf.while_loop, tf.cond), out of their "
                "reach. Use LayerNormalization there."
            )
        self._given.put(value)
        merged = self._merged.get()
        if merged is None:
            raise _WorkerStopped
        return merged

    def stop(self) -> None:
        """Ends it, if it has not ended; afterwards its thread is gone."""
        if self.is_alive():
            self._merged.put(None)
            self.join()
