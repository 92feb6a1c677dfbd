"""Brings an error of the input pipeline out with its class and message.

TensorFlow turns an exception inside tf.data into an error of its own with a stack of both worlds in it. What a reader
raised is therefore noted here, and whoever catches TensorFlow's error asks for it.

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
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import StoreUnavailableError, TfdistError, UserError, exit_status_of_error
from tfdist.storage import troubles

_LOCK = threading.Lock()
_FIRST: list[TfdistError] = []
# Between two calls of one pipeline lies a hand-over between threads of TensorFlow's, some tens of microseconds.
STILL_SECONDS = 0.2
MOST_SECONDS = 20.0


class InterpreterEnds(Exception):
    """What a reader's call ends with once the interpreter is about to go."""


class Calls:
    """The calls of Python code out of pipelines, in progress and made."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = 0
        self._made = 0
        self._closed = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around each call; raises InterpreterEnds where none may begin any more."""
        with self._changed:
            self._made += 1
            closed = self._closed
            self._active += not closed
        if closed:
            raise InterpreterEnds("The interpreter is ending.")
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Waits for the calls in progress, and until no pipeline begins another."""
        deadline = time.monotonic() + MOST_SECONDS
        with self._changed:
            self._closed = True
            if not self._made:
                return
            self._changed.wait_for(lambda: not self._active, MOST_SECONDS)
        while time.monotonic() < deadline:
            before = self._made
            time.sleep(STILL_SECONDS)
            if self._made == before:
                return


_CALLS = Calls()
atexit.register(_CALLS.close)


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose errors for the user are kept for `take`; not called any more once the interpreter ends."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            with _CALLS.one():
                return function(*args)
        except (TfdistError, StoreUnavailableError) as error:
            told = error if isinstance(error, TfdistError) else troubles.explain_failure(error)
            assert told is not None
            told.exit_status = exit_status_of_error(error)  # what `raise … from` makes of its cause
            with _LOCK:
                if not _FIRST:
                    _FIRST.append(told)
            raise

    return call


def take() -> TfdistError | None:
    """The first error noted since the last call, if there is one."""
    with _LOCK:
        return _FIRST.pop() if _FIRST else None


@contextlib.contextmanager
def raise_noted_errors() -> Iterator[None]:
    """Raises what was noted in the place of TensorFlow's error."""
    try:
        yield
    except tf.errors.OpError as error:
        told = take()
        if told is None:
            raise
        raise told from error


def forget() -> None:
    """Starts anew: what was noted until now has nothing to do with what fails from here on."""
    with _LOCK:
        _FIRST.clear()


def explained(error: BaseException) -> TfdistError | None:
    """Returns what TensorFlow's own error says about the data, for the two that do not say it well."""
    said = str(error.message) if isinstance(error, tf.errors.FailedPreconditionError) else ""
    ended = re.search(r"expected to contain (?P<said>\d+) elements? but contained (only|at least) (?P<found>\d+)", said)
    if ended is not None:
        return UserError(
            f"An epoch of the dataset has {ended[2]} {ended['found']} examples, and {ended['said']} are expected, "
            "which is num_examples or, without it, what the first epoch had. Give every epoch as many, or write "
            "num_examples = N, no more than the shortest has."
        )
    # A message of TensorFlow's with bytes of a record in it fails to become text.
    if isinstance(error, UnicodeDecodeError) and b"Could not parse example input" in error.object:
        return UserError("A record of the files is not a tf.train.Example, which features describe. Write it again.")
    return None
