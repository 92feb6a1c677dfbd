"""The memory and operations that are read out of a traced function are those that a hand counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfdist.models.transformer import TransformerBlock
from tfdist.planning.liveness import Buffer, MemoryTracer

MB = 1_000_000


def followed(function: Callable[..., Any], *specs: tf.TensorSpec) -> MemoryTracer:
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    tracer = MemoryTracer()
    tracer.trace(graph, [Buffer(0, kept=True) for _ in graph.inputs])
    return tracer


def floats(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float32)


def square_repeatedly(x: tf.Tensor) -> tf.Tensor:
    for _ in range(5):
        x = tf.matmul(x, x)
    return x


def read_again(x: tf.Tensor) -> tf.Tensor:
    first = tf.matmul(x, x)
    return tf.matmul(first, tf.exp(first))


def branch(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: tf.matmul(tf.matmul(x, x), x))


@pytest.mark.parametrize(
    ("function", "shape", "peak"),
    [
        (lambda x: tf.tanh(tf.exp(tf.sin(x))), (MB,), 4 * MB),  # which write into what nobody needs
        (read_again, (500, 500), 3 * MB),  # what is read again stays
        (square_repeatedly, (500, 500), 2 * MB),  # what nobody reads goes
        (branch, (500, 500), pytest.approx(2 * MB, rel=0.01)),  # of two branches the larger counts
    ],
    ids=["elementwise", "read again", "not read again", "branches"],
)
def test_what_is_needed_later_takes_memory(function: Callable[..., Any], shape: tuple[int, ...], peak: Any) -> None:
    assert followed(function, floats(*shape)).peak == peak


def test_a_loop_keeps_what_its_gradient_needs_of_every_turn() -> None:
    def function(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(lambda i, _: i < 20, lambda i, y: (i + 1, tf.tanh(y)), (0, x), maximum_iterations=20)
        return tape.gradient(y, x)

    few = 20 * 4 * MB  # an output of each turn
    assert few <= followed(function, floats(MB)).peak <= 1.2 * few


def test_a_product_by_letters_counts_as_one() -> None:
    assert (
        followed(lambda x, y: tf.einsum("...ij,jk->...ik", x, y), floats(3, 5, 7), floats(7, 11)).flops
        == 2 * 3 * 5 * 7 * 11
    )


def test_reading_a_variable_takes_nothing() -> None:
    variable = tf.Variable(tf.zeros([500, 500]))
    assert followed(lambda x: tf.matmul(x, variable), floats(1, 500)).peak == 2000


def trained(model: keras.Model) -> Callable[[tf.Tensor], list[tf.Tensor]]:
    def function(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(model(x, training=True))
        return [y, *tape.gradient(y, model.trainable_variables)]

    return function


@pytest.mark.slow
def test_flops_are_those_counted_by_hand() -> None:
    dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])
    forward = 2 * 32 * (64 * 256 + 256 * 10)
    of_inputs = 2 * 32 * 64 * 256  # whose gradient nobody asks for
    assert followed(trained(dense), floats(32, 64)).flops == 3 * forward - of_inputs

    layers = [keras.layers.Conv2D(16, 3, padding="same"), keras.layers.Conv2D(8, 3, strides=2, padding="same")]
    convolutions = keras.Sequential([keras.Input((32, 32, 3)), *layers])
    first, second = 2 * 4 * 32 * 32 * 16 * 27, 2 * 4 * 16 * 16 * 8 * 9 * 16
    assert followed(trained(convolutions), floats(4, 32, 32, 3)).flops == 2 * first + 3 * second

    inputs = keras.Input((16, 64))
    block = keras.Model(inputs, TransformerBlock(4, causal=False)(inputs))
    tokens = 8 * 16
    projections, wide, attention = 4 * 2 * tokens * 64 * 64, 2 * 2 * tokens * 64 * 256, 2 * 2 * tokens * 16 * 64
    assert followed(trained(block), floats(8, 16, 64)).flops == pytest.approx(
        3 * (projections + wide + attention), rel=0.01
    )
