"""Keras draws for the parts of a batch what it draws for the batch, whatever the parts, with XLA and without."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_patches.random_by_place import RowRange, draw_for_rows, record_fixed_shapes

BATCH = 24
PARTS = (5, 7, 12)  # one begins within a block of four numbers, another at its begin
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(BATCH, 7, 3)).astype(np.float32)
LOGITS = RNG.normal(size=(BATCH, 5)).astype(np.float32)
SHAPES = RNG.uniform(1, 3, size=(BATCH, 3)).astype(np.float32)
Draw = Callable[[Any, Any], tf.Tensor]  # of some rows, as a slice, and how many they are


def drop(dtype: str = "float32", noise_shape: Any = None) -> Draw:
    return lambda rows, n: keras.random.dropout(tf.constant(IMAGES, dtype)[rows], 0.3, noise_shape, seed=7)


DRAWS: dict[str, Draw] = {
    "uniform": lambda rows, n: keras.random.uniform((n, 5), seed=7),
    "uniform in blocks": lambda rows, n: keras.random.uniform((n, 8), seed=7),
    "uniform in bounds": lambda rows, n: keras.random.uniform((n, 5), -1.0, 3.0, seed=7),
    "a number an example": lambda rows, n: keras.random.uniform((n,), seed=7),
    "rows of several examples": lambda rows, n: keras.random.uniform((n * 3, 5), seed=7),
    "uniform in float16": lambda rows, n: keras.random.uniform((n, 5), dtype="float16", seed=7),
    "uniform in bfloat16": lambda rows, n: keras.random.uniform((n, 5), dtype="bfloat16", seed=7),
    "normal": lambda rows, n: keras.random.normal((n, 5), 1.0, 2.0, seed=7),
    "normal in float16": lambda rows, n: keras.random.normal((n, 5), dtype="float16", seed=7),
    "normal in bfloat16": lambda rows, n: keras.random.normal((n, 5), dtype="bfloat16", seed=7),
    "integers": lambda rows, n: keras.random.randint((n, 5), 3, 1000, seed=7),
    "long integers": lambda rows, n: keras.random.randint((n, 5), 3, 1000, dtype="int64", seed=7),
    "dropout": drop(),
    "dropout in float16": drop("float16"),
    "dropout of columns": drop(noise_shape=(None, 1, 3)),
    "binomial": lambda rows, n: keras.random.binomial((n, 3), 10.0, 0.3, seed=7),
}
BY_KERNELS_ALONE: dict[str, Draw] = {  # XLA draws others, or none
    "uniform in float64": lambda rows, n: keras.random.uniform((n, 5), dtype="float64", seed=7),
    "normal in float64": lambda rows, n: keras.random.normal((n, 5), dtype="float64", seed=7),
    "truncated normal": lambda rows, n: keras.random.truncated_normal((n, 5), seed=7),
    "categorical": lambda rows, n: keras.random.categorical(tf.constant(LOGITS)[rows], 4, seed=7),
    "gamma": lambda rows, n: keras.random.gamma((n, 3), tf.constant(SHAPES)[rows], seed=7),
    "beta": lambda rows, n: keras.random.beta((n, 3), tf.constant(SHAPES)[rows], 2.0, seed=7),
}


def draw_whole(draws: dict[str, Draw]) -> dict[str, np.ndarray]:
    compute = tf.function(lambda: {name: draw(slice(0, BATCH), BATCH) for name, draw in draws.items()}, autograph=False)
    return {name: drawn.numpy() for name, drawn in compute().items()}


def draw_parts(draws: dict[str, Draw], *, jit_compile: bool, is_static: bool) -> dict[str, np.ndarray]:
    parts = []
    for place, count in zip(itertools.accumulate((0, *PARTS)), PARTS, strict=False):

        def draw_part(first: Any, size: Any, place: int = place, count: int = count) -> dict[str, tf.Tensor]:
            with draw_for_rows(RowRange(first, count if is_static else size, BATCH, jit_compile)):
                first, size, n = (place, count, count) if is_static else (first, size, tf.cast(size, tf.int32))
                return {name: draw(slice(first, first + size), n) for name, draw in draws.items()}

        compute = tf.function(draw_part, jit_compile=jit_compile, autograph=False)
        parts.append(compute(tf.constant(place, tf.int64), tf.constant(count, tf.int64)))
    return {name: np.concatenate([part[name].numpy() for part in parts]) for name in draws}


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [True, False])
def test_parts_have_the_bits_of_the_whole(is_static: bool) -> None:
    draws = DRAWS | BY_KERNELS_ALONE
    expected, found = draw_whole(draws), draw_parts(draws, jit_compile=False, is_static=is_static)
    assert [name for name in draws if found[name].tobytes() != expected[name].tobytes()] == []


@pytest.mark.slow
def test_xla_draws_the_same() -> None:
    """XLA multiplies and adds at once, and has its own logarithm: both round otherwise. What is dropped is the same."""
    drawn, expected = draw_parts(DRAWS, jit_compile=True, is_static=True), draw_whole(DRAWS)
    for name, found in drawn.items():
        whole = expected[name].astype(np.float64)
        np.testing.assert_allclose(found.astype(np.float64), whole, rtol=0, atol=5e-6, err_msg=name)
        assert (found == 0).tobytes() == (whole == 0).tobytes(), name


@pytest.mark.parametrize("jit_compile", [False, True])
def test_what_is_not_of_the_batch_is_the_same_for_all(jit_compile: bool) -> None:
    """A trace for batches of any size tells 12 rows of weights from 12 examples."""

    def noise(n: Any) -> tf.Tensor:
        return keras.random.uniform((12, 4), seed=7) + 2.0 * keras.random.uniform((n, 1), seed=3)[:1, :1] * 0.0

    with record_fixed_shapes() as shapes:
        tf.function(lambda x: noise(tf.shape(x)[0])).get_concrete_function(tf.TensorSpec([None, 3]))
    assert shapes == {(12, 4)}

    def draw(first: tf.Tensor) -> tf.Tensor:
        with draw_for_rows(RowRange(first, 12, BATCH, jit_compile, frozenset(shapes))):
            return noise(12)

    drawn = [tf.function(draw, jit_compile=jit_compile)(tf.constant(first, tf.int64)).numpy() for first in (0, 12)]
    assert drawn[0].tobytes() == drawn[1].tobytes() == keras.random.uniform((12, 4), seed=7).numpy().tobytes()


def test_what_is_cut_from_the_whole_and_not_of_the_batch_is_tensorflows() -> None:
    expected = keras.random.truncated_normal((5, 4), seed=7).numpy()
    for is_compiled in (False, True):
        with draw_for_rows(RowRange(tf.constant(12, tf.int64), 12, BATCH, is_compiled)):
            assert keras.random.truncated_normal((5, 4), seed=7).numpy().tobytes() == expected.tobytes()


def test_other_draws_are_tensorflows() -> None:
    functions = tf.random.stateless_uniform, tf.nn.experimental.stateless_dropout
    expected = keras.random.uniform((4, 3), seed=7).numpy()
    with draw_for_rows(RowRange(4, 4, 8)):
        assert keras.random.uniform((4, 3), seed=7).numpy().tobytes() != expected.tobytes()
    assert (tf.random.stateless_uniform, tf.nn.experimental.stateless_dropout) == functions
    assert keras.random.uniform((4, 3), seed=7).numpy().tobytes() == expected.tobytes()
