"""Batch normalization that means the same on every number of replicas.

A replica's own statistics are those of a smaller batch, so the number of replicas would change the training. With
statistics over the global batch it does not; the price is two small reductions in each such layer and pass.

Keras's own `synchronized=True` computes the variance as E[x²] − E[x]², which cancels where the mean is large against
the spread, and leaves masked batches to each replica. Here the squares are taken around the global mean, as in Chan,
Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983), and a mask counts as it does on one device.
Invariant: the layers are as the user made them before and afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.strategies.base import Strategy

MOMENTS = "_moments"  # the private method of Keras's layer that is replaced; a test fails when Keras changes it
Moments = Callable[[tf.Tensor, tf.Tensor | None], tuple[tf.Tensor, tf.Tensor]]


def batch_norm_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The model's batch normalization layers, at any depth."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def is_synchronized(layer: keras.layers.BatchNormalization) -> bool:
    """Whether the layer's statistics are taken over all replicas."""
    return layer.synchronized or MOMENTS in vars(layer)


def microbatch_note(model: keras.Model, *, num_microbatches: int, global_batch_size: int) -> str | None:
    """What to say of a model that normalizes by statistics of microbatches; None of one that does not."""
    layers = [layer.name for layer in batch_norm_layers(model) if layer.trainable]
    if num_microbatches == 1 or not layers:
        return None
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return (
        f"Batch normalization ({layers[0]}{more}) takes the statistics of each of the {num_microbatches} microbatches, "
        f"not of the whole batch of {global_batch_size}: with another train.num_microbatches this is another training."
    )


@contextlib.contextmanager
def synchronized(model: keras.Model, strategy: Strategy, *, wanted: bool) -> Iterator[int]:
    """While it lasts, batch normalization layers compute their statistics over all replicas.

    Those with `synchronized=True` do so whether it is `wanted` or not; a subclass that takes its statistics in a way of
    its own is left alone. Yields how many layers that changed.

    Raises:
      RuntimeError: Keras's layer has no such method any more.
    """
    kerass = getattr(keras.layers.BatchNormalization, MOMENTS, None)
    if kerass is None:
        raise RuntimeError("This Keras takes batch statistics elsewhere: they would be each replica's own.")
    wanted = wanted and strategy.topology.num_replicas > 1
    layers = [layer for layer in batch_norm_layers(model) if getattr(type(layer), MOMENTS) is kerass]
    changed = [layer for layer in layers if wanted or layer.synchronized]
    for layer in changed:
        setattr(layer, MOMENTS, _moments_of(layer))
    try:
        yield len(changed)
    finally:
        for layer in changed:
            delattr(layer, MOMENTS)


def _moments_of(layer: keras.layers.BatchNormalization) -> Moments:
    """What takes the place of the layer's own method."""

    def moments(inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        axes = [axis for axis in range(inputs.shape.rank) if axis != layer.axis % inputs.shape.rank]
        return global_moments(tf.convert_to_tensor(inputs), mask, axes)

    return moments


def global_moments(inputs: tf.Tensor, mask: tf.Tensor | None, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and biased variance over `axes` of the global batch; in replica context, elsewhere of `inputs` alone.

    Two reductions: of sums and counts, then of the squared distances from the global mean. The gradient is exact: that
    of the second through the mean is a multiple of Σ(x − mean), which is zero.

    Args:
      inputs: [n, …], float32 or float64.
      mask: [n, …], one axis fewer, false where a place does not count; None counts all.
      axes: all axes of `inputs` but the channels'.

    Returns:
      Two vectors of the channels' length.
    """
    if mask is None:
        counts = tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), inputs.dtype)[tf.newaxis]
    else:
        counted = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
        inputs = tf.where(counted, inputs, tf.zeros_like(inputs))
        counts = tf.reduce_sum(tf.cast(counted, inputs.dtype), axes)
    sums = tf.reduce_sum(inputs, axes)
    sums, counts = tf.split(_over_replicas(tf.concat([sums, counts], 0)), [tf.size(sums), tf.size(counts)])
    if mask is not None:
        counts += keras.config.epsilon()  # as Keras's layer does
    mean = tf.math.divide_no_nan(sums, counts)
    center = tf.stop_gradient(tf.reshape(mean, [1 if axis in axes else -1 for axis in range(inputs.shape.rank)]))
    distances = tf.math.squared_difference(inputs, center)
    if mask is not None:
        distances = tf.where(counted, distances, tf.zeros_like(distances))
    return mean, tf.math.divide_no_nan(_over_replicas(tf.reduce_sum(distances, axes)), counts)


def _over_replicas(vector: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    return vector if context is None else context.all_reduce(tf.distribute.ReduceOp.SUM, vector)
