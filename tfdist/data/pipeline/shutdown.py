"""Lets the interpreter end while pipelines are still alive.

A pipeline reads ahead on threads of TensorFlow's, and these call the readers' Python code. Once the interpreter is
being taken down, such a thread can no longer get hold of it: it is ended in the middle of TensorFlow's code, which
aborts the process, or it waits for ever, and so does whoever takes down the pipeline.

Invariant: when Python's own teardown begins, no reader runs and none will be called. From `atexit` on every call ends
at once with an error; a pipeline nobody takes from makes as many more calls as its buffers hold and is then still.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterator

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


CALLS = Calls()
atexit.register(CALLS.close)
