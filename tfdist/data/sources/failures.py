"""Brings an error of the input pipeline out with its class and message.

TensorFlow turns an exception inside tf.data into an error of its own with a stack of both worlds in it. What a reader
raised is therefore recorded here, and whoever catches TensorFlow's error asks for it.

A pipeline reads ahead on threads of TensorFlow's, which call the readers' Python code. One that calls while the
interpreter is being taken down aborts the process or waits for ever, and so does whoever takes down the pipeline.
Invariant: from `atexit` on every call ends at once with an error, and Python's teardown begins when no reader runs; a
pipeline nobody takes from makes as many more calls as its buffers hold and is then still.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import StoreUnavailableError, TfdistError, UserError, exit_status_of_error
from tfdist.storage import troubles

_LOCK = threading.Lock()
_RECORDED: list[TfdistError] = []
# Between two calls of one pipeline lies a hand-over between threads of TensorFlow's, some tens of microseconds.
IDLE_SECONDS = 0.2
MAX_SECONDS = 20.0


class PythonCallTracker:
    """Tracker of Python calls from pipelines, so that the interpreter waits for them at exit and refuses new ones."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = 0
        self._made = 0
        self._closed = False

    @contextlib.contextmanager
    def guard_call(self) -> Iterator[None]:
        """Around each call; raises RuntimeError where none may begin any more."""
        with self._changed:
            self._made += 1
            closed = self._closed
            self._active += not closed
        if closed:
            raise RuntimeError("The interpreter is ending.")
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Waits for the calls in progress, and until no pipeline begins another."""
        deadline = time.monotonic() + MAX_SECONDS
        with self._changed:
            self._closed = True
            if not self._made:
                return
            self._changed.wait_for(lambda: not self._active, MAX_SECONDS)
        while time.monotonic() < deadline:
            before = self._made
            time.sleep(IDLE_SECONDS)
            if self._made == before:
                return


_CALLS = PythonCallTracker()
atexit.register(_CALLS.close)


def record_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose errors for the user are kept for `pop_error`; not called any more once the interpreter ends."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            with _CALLS.guard_call():
                return function(*args)
        except (TfdistError, StoreUnavailableError) as error:
            recorded = error if isinstance(error, TfdistError) else troubles.explain_failure(error)
            assert recorded is not None
            recorded.exit_status = exit_status_of_error(error)  # what `raise … from` makes of its cause
            with _LOCK:
                if not _RECORDED:
                    _RECORDED.append(recorded)
            raise

    return call


def call_python(function: Callable[..., Any], arguments: Sequence[tf.Tensor], structure: Any) -> Any:
    """Calls a reader's Python code out of a pipeline.

    Args:
      function: from arrays to a list of arrays; its errors for the user are kept for `pop_error`.
      arguments: tensors, which it gets as arrays.
      structure: the nest of `tf.TensorSpec`s of what it gives, flat in their order.
    """
    specs = tf.nest.flatten(structure)
    found = tf.nest.flatten(tf.numpy_function(record_errors(function), arguments, [spec.dtype for spec in specs]))
    shaped = [tf.ensure_shape(each, spec.shape) for each, spec in zip(found, specs, strict=True)]
    return tf.nest.pack_sequence_as(structure, shaped)


def pop_error() -> TfdistError | None:
    """The first error recorded since the last call, if there is one."""
    with _LOCK:
        return _RECORDED.pop() if _RECORDED else None


@contextlib.contextmanager
def raise_recorded_errors() -> Iterator[None]:
    """Raises, instead of an error of TensorFlow's, the recorded one that caused it."""
    try:
        yield
    except tf.errors.OpError as error:
        recorded = pop_error()
        if recorded is None:
            raise
        raise recorded from error


def clear_errors() -> None:
    """Forgets the recorded errors, which are not the cause of what fails from here on."""
    with _LOCK:
        _RECORDED.clear()


def explain_error(error: BaseException) -> TfdistError | None:
    """Returns what TensorFlow's own error says about the data, for the two that do not say it well."""
    said = str(error.message) if isinstance(error, tf.errors.FailedPreconditionError) else ""
    ended = re.search(r"expected to contain (?P<said>\d+) elements? but contained (only|at least) (?P<found>\d+)", said)
    if ended is not None:
        return UserError(
            f"An epoch of the dataset has {ended[2]} {ended['found']} examples, and {ended['said']} are expected, "
            "which is num_examples or, without it, what the first epoch had. Give every epoch as many, or write "
            "tfdist.DatasetFunction.num_examples = N, no more than the shortest has."
        )
    # A message of TensorFlow's with bytes of a record in it fails to become text.
    if isinstance(error, UnicodeDecodeError) and b"Could not parse example input" in error.object:
        return UserError("A record of the files is not a tf.train.Example, which features describe. Write it again.")
    return None
