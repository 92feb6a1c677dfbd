"""Brings an error of the input pipeline out with its class and message.

TensorFlow turns an exception inside tf.data into an error of its own with a stack of both worlds in it. What a reader
raised is therefore noted here, and whoever catches TensorFlow's error asks for it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from tfdist.errors import TfdistError

_LOCK = threading.Lock()
_FIRST: list[TfdistError] = []


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose errors for the user are kept for `take`."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except TfdistError as error:
            with _LOCK:
                if not _FIRST:
                    _FIRST.append(error)
            raise

    return call


def take() -> TfdistError | None:
    """The first error noted since the last call, if there is one."""
    with _LOCK:
        return _FIRST.pop() if _FIRST else None
