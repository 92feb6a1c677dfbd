"""Random numbers by place: of what one device draws for the whole batch, a replica draws the rows of its examples.

TensorFlow's generator, Philox, counts (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): elements
4e to 4e + 3 of a tensor come from the counter plus e. So rows are drawn alone, at the cost of these rows, by moving the
counter past the rows before them. XLA turns the same bits into other floats than TensorFlow's kernels do. Under XLA
floats are therefore made of the bits here, as the kernels make them; those of float64 and truncated ones are XLA's own.

Invariant: each element is the one that TensorFlow draws for the whole batch with the same seed. What does not begin
with the batch, such as noise for weights, is the same everywhere. Elsewhere TensorFlow draws as always.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.keras_patches.patches import SharedPatch

PHILOX = 1  # of TensorFlow's enumeration of generators
FLOATS = (tf.float32, tf.float16, tf.bfloat16)
MANTISSAS = {tf.float32: (tf.uint32, 23, 127), tf.float16: (tf.uint16, 10, 15), tf.bfloat16: (tf.uint16, 7, 127)}
SMALLEST = 1e-7  # of the uniform numbers that normal ones are made of
Shape = Any  # a sequence of sizes, or an int32 vector
FixedShapes = frozenset[tuple[int, ...]]


class RowRange(NamedTuple):
    """The examples that a replica computes: a part of the global batch's rows, one after the other.

    Attributes:
      first: int64 scalar, the first one's place in the global batch; or 0, from where TensorFlow draws.
      count: how many, an integer, or an int64 scalar where it is not static.
      most: examples of the largest global batch.
      is_compiled: whether XLA compiles what is drawn.
      fixed_shapes: of draws that are the same for all rows, whatever the first axis.
    """

    first: Any
    count: Any
    most: int
    is_compiled: bool = False
    fixed_shapes: FixedShapes = frozenset()

    @property
    def starts_batch(self) -> bool:
        """Whether it is known that TensorFlow draws from the same place on."""
        return isinstance(self.first, int) and self.first == 0


class _Drawing(threading.local):
    """The draws of this thread; MirroredStrategy has a thread for each replica."""

    rows: RowRange | None = None
    fixed_shapes: set[tuple[int, ...]] | None = None


_drawing = _Drawing()
_uniform, _normal = tf.random.stateless_uniform, tf.random.stateless_normal
_truncated_normal, _categorical = tf.random.stateless_truncated_normal, tf.random.stateless_categorical
_gamma, _binomial = tf.random.stateless_gamma, tf.random.stateless_binomial


@contextlib.contextmanager
def draw_for_rows(rows: RowRange | None) -> Iterator[None]:
    """Has this thread draw, by TensorFlow's and Keras's functions, for these rows; None: for a whole batch."""
    if rows is None:
        yield
        return
    before, _drawing.rows = _drawing.rows, rows
    try:
        with _RANDOM, _NN:
            yield
    finally:
        _drawing.rows = before


@contextlib.contextmanager
def record_fixed_shapes() -> Iterator[set[tuple[int, ...]]]:
    """Collects the shapes that this thread draws while it traces batches of any size, and that do not depend on it."""
    shapes: set[tuple[int, ...]] = set()
    before, _drawing.fixed_shapes = _drawing.fixed_shapes, shapes
    try:
        with _RANDOM, _NN:
            yield shapes
    finally:
        _drawing.fixed_shapes = before


def _find_rows(shape: Shape) -> RowRange | None:
    """The rows to draw for, from 0 on where the shape does not begin with the batch; None: all, as TensorFlow draws."""
    rows = _drawing.rows
    if rows is None and _drawing.fixed_shapes is None:
        return None
    has_tensors = any(map(tf.is_tensor, tf.nest.flatten(shape)))
    static = tf.zeros(shape).shape if has_tensors else tf.TensorShape(shape)
    if _drawing.fixed_shapes is not None and static.is_fully_defined():
        _drawing.fixed_shapes.add(tuple(static))
    if rows is None or _begins_with_batch(static, rows):
        return rows
    return rows._replace(first=0) if rows.is_compiled else None


def _begins_with_batch(shape: tf.TensorShape, rows: RowRange) -> bool:
    if not shape.rank or (shape.is_fully_defined() and tuple(shape) in rows.fixed_shapes):
        return False
    if isinstance(rows.count, int) and shape[0] is not None:
        return shape[0] % rows.count == 0
    return shape[0] is None


def _measure(shape: Shape) -> tuple[Any, Any, Any]:
    """A shape as integers where they are static; how many elements it has, and its vector."""
    vector = tf.convert_to_tensor(shape.as_list() if isinstance(shape, tf.TensorShape) else shape, tf.int32)
    static = tf.get_static_value(vector)
    if static is not None:
        return [int(size) for size in static], math.prod(int(size) for size in static), vector
    return vector, tf.reduce_prod(tf.cast(vector, tf.int64)), vector


def _draw_part(draw: Callable[..., tf.Tensor], shape: Shape, seed: Any, rows: RowRange, *, block: int) -> tf.Tensor:
    """The part of `rows` of a tensor over the global batch.

    Args:
      draw: takes a shape, a key and a counter.
      shape: of the part.
      seed: int32 [2].
      rows: whose part it is.
      block: elements that come from one count.
    """
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.convert_to_tensor(seed))
    sizes, count, vector = _measure(shape)
    if rows.starts_batch:
        return draw(sizes, key, counter)
    is_static = isinstance(count, int) and isinstance(rows.count, int)
    a_row = count // rows.count if is_static else tf.cast(count, tf.int64) // tf.cast(rows.count, tf.int64)
    begin = tf.cast(rows.first, tf.int64) * a_row
    low = counter[0] + tf.cast(begin // block, tf.uint64)
    high = counter[1] + tf.cast(low < counter[0], tf.uint64)
    moved = tf.stack([low, high])
    if is_static and a_row % block == 0:
        return draw(sizes, key, moved)
    flat = draw([count + block - 1] if is_static else tf.cast([count + block - 1], tf.int32), key, moved)
    begin = tf.reshape(tf.cast(begin % block, tf.int32), [1])
    return tf.reshape(tf.slice(flat, begin, [count] if is_static else tf.cast([count], tf.int32)), vector)


def _draw_bits(shape: Shape, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key, counter=counter, alg=PHILOX, dtype=tf.uint32
    )


def _to_unit(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Floats in [0, 1) whose mantissas are the low ones of 32 bits, as TensorFlow's kernels make them."""
    unsigned, mantissa, exponent = MANTISSAS[dtype]
    kept = tf.bitwise.bitwise_and(tf.cast(bits, unsigned), tf.constant(2**mantissa - 1, unsigned))
    return tf.bitcast(tf.bitwise.bitwise_or(kept, tf.constant(exponent << mantissa, unsigned)), dtype) - 1


def _to_normal(bits: tf.Tensor) -> tf.Tensor:
    """Normal numbers, two of two words of a vector (Box and Muller, 1958), as TensorFlow's kernels make them."""
    first, second = tf.unstack(tf.reshape(_to_unit(bits, tf.float32), [-1, 2]), axis=1)
    radius, angle = tf.sqrt(-2.0 * tf.math.log(tf.maximum(first, SMALLEST))), 2.0 * math.pi * second
    return tf.reshape(tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1), [-1])


def draw_uniform(
    shape: Shape,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = tf.float32,
    name: str | None = None,
    alg: Any = "auto_select",
) -> tf.Tensor:
    """Draws as `tf.random.stateless_uniform` does, for this replica's rows."""
    rows, dtype = _find_rows(shape), tf.as_dtype(dtype)
    if rows is None or (dtype.is_integer and maxval is None):
        return _uniform(shape, seed, minval, maxval, dtype, name, alg)
    least, most = tf.cast(minval, dtype), tf.cast(1 if maxval is None else maxval, dtype)

    def draw(shape: Shape, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
        drawn: dict[str, Any] = {"shape": shape, "key": key, "counter": counter, "alg": PHILOX}
        if dtype.is_integer:
            return tf.raw_ops.StatelessRandomUniformIntV2(**drawn, minval=least, maxval=most)
        if rows.is_compiled and dtype in FLOATS:
            return _to_unit(_draw_bits(shape, key, counter), dtype)
        return tf.raw_ops.StatelessRandomUniformV2(**drawn, dtype=dtype)

    part = _draw_part(draw, shape, seed, rows, block=4 if dtype.size <= 4 else 2)
    is_unit = maxval is None and isinstance(minval, int) and not minval
    return part if dtype.is_integer or is_unit else part * (most - least) + least


def draw_normal(
    shape: Shape,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = tf.float32,
    name: str | None = None,
    alg: Any = "auto_select",
) -> tf.Tensor:
    """Draws as `tf.random.stateless_normal` does, for this replica's rows."""
    rows, dtype = _find_rows(shape), tf.as_dtype(dtype)
    if rows is None:
        return _normal(shape, seed, mean, stddev, dtype, name, alg)

    def draw(shape: Shape, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
        if not (rows.is_compiled and dtype in FLOATS):
            options: dict[str, Any] = {"alg": PHILOX, "dtype": dtype}
            return tf.raw_ops.StatelessRandomNormalV2(shape=shape, key=key, counter=counter, **options)
        sizes, count, _ = _measure(shape)
        bits = _draw_bits([count + count % 2], key, counter)
        return tf.reshape(tf.cast(_to_normal(bits)[:count], dtype), sizes)

    part = _draw_part(draw, shape, seed, rows, block=4 if dtype.size <= 4 else 2)
    return part * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def draw_dropout(
    x: Any, rate: Any, seed: Any, rng_alg: Any = "auto_select", noise_shape: Any = None, name: str | None = None
) -> tf.Tensor:
    """Drops as `tf.nn.experimental.stateless_dropout` does, for this replica's rows."""

    def sample(shape: Shape, dtype: Any) -> tf.Tensor:
        return draw_uniform(shape, seed, dtype=dtype, alg=rng_alg)

    return tf.nn.experimental.general_dropout(x, rate, sample, noise_shape, name)


def _cut_from_whole(draw: Callable[..., tf.Tensor], names: tuple[str, ...]) -> Callable[..., tf.Tensor]:
    """Builds what draws for the whole batch and keeps this replica's rows: where elements take several counts each.

    Args:
      draw: takes a shape and a seed.
      names: of its parameters that may have a row for each example.
    """

    def draw_rows(shape: Shape, seed: Any, *values: Any, **named: Any) -> tf.Tensor:
        """Draws as `draw` does, for this replica's rows."""
        rows = _find_rows(shape)
        if rows is None or rows.starts_batch:
            return draw(shape, seed, *values, **named)
        arguments = inspect.signature(draw).bind(shape, seed, *values, **named).arguments
        own = tf.convert_to_tensor(shape, tf.int32)
        each = own[0] // tf.cast(rows.count, tf.int32)
        first, size = tf.cast(rows.first, tf.int32) * each, rows.most * each
        for name in names:
            if name in arguments:
                arguments[name] = _pad_parameter(arguments[name], own, first, size)
        arguments["shape"] = tf.concat([[size], own[1:]], 0)
        whole = draw(**arguments)
        return tf.slice(whole, tf.concat([[first], tf.zeros_like(own[1:])], 0), own)

    return draw_rows


def _pad_parameter(value: Any, shape: tf.Tensor, first: tf.Tensor, size: tf.Tensor) -> Any:
    """A parameter with a row for each example as one of the whole batch, whose other rows are 1."""
    value = tf.convert_to_tensor(value)
    if value.shape.rank != shape.shape[0] or value.shape[0] == 1:
        return value
    pads = [[0, size - shape[0]], *[[0, 0]] * (value.shape.rank - 1)]
    return tf.roll(tf.pad(value, pads, constant_values=1), first, axis=0)


def draw_categorical(
    logits: Any, num_samples: Any, seed: Any, dtype: Any = tf.int64, name: str | None = None
) -> tf.Tensor:
    """Draws as `tf.random.stateless_categorical` does, for this replica's rows."""
    logits = tf.convert_to_tensor(logits)
    num_rows = tf.shape(logits)[0] if logits.shape[0] is None else logits.shape[0]

    def draw(shape: Shape, seed: Any, logits: Any) -> tf.Tensor:
        return _categorical(logits, num_samples, seed, dtype, name)

    return _cut_from_whole(draw, ("logits",))([num_rows, num_samples], seed, logits)


_RANDOM = SharedPatch(
    tf.random,
    stateless_uniform=draw_uniform,
    stateless_normal=draw_normal,
    stateless_truncated_normal=_cut_from_whole(_truncated_normal, ("mean", "stddev")),
    stateless_categorical=draw_categorical,
    stateless_gamma=_cut_from_whole(_gamma, ("alpha", "beta")),
    stateless_binomial=_cut_from_whole(_binomial, ("counts", "probs")),
)
_NN = SharedPatch(tf.nn.experimental, stateless_dropout=draw_dropout)
