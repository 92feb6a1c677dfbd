"""`tf.function` for what every run makes anew."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def traced(function: Callable[..., Any], *, reduce_retracing: bool = False) -> Any:
    """A `tf.function` of a method or a lambda, without AutoGraph.

    TensorFlow counts how often a piece of code is traced, and would warn in the fifth run of a process (a notebook, a
    sweep in one process) that it is traced too often. What has no code of its own is counted by itself.
    """
    return tf.function(functools.partial(function), reduce_retracing=reduce_retracing, autograph=False)
