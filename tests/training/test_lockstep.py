"""Functions that are traced side by side see each other's values, and end together."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import tensorflow as tf

from tfdist.training.step.layers.lockstep import meet, side_by_side


def traced_together(*functions: Callable[[], tf.Tensor]) -> list[float]:
    return [float(value) for value in tf.function(lambda: side_by_side(functions, tf.add_n), autograph=False)()]


def test_every_function_gets_what_all_of_them_make() -> None:
    found = traced_together(lambda: 1.0 + meet(meet(tf.constant(2.0))), lambda: meet(10.0 * meet(tf.constant(3.0))))
    assert found == [56.0, 55.0]


def test_where_one_fails_the_others_end_too() -> None:
    def fails() -> tf.Tensor:
        meet(tf.constant(1.0))
        raise ZeroDivisionError

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        traced_together(lambda: meet(meet(tf.constant(1.0))), fails, lambda: meet(meet(tf.constant(1.0))))
    assert threading.active_count() == before
