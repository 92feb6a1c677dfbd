"""Batch normalization that means the same on every number of replicas.

A replica's own statistics are those of a smaller batch, so the number of replicas would change the training. With
statistics over the global batch it does not; the price is two small reductions in each such layer and pass.

Keras's own `synchronized=True` computes the variance as E[x²] − E[x]², which cancels where the mean is large against
the spread, and leaves masked batches to each replica. Here the squares are taken around the global mean, as in Chan,
Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983), and a mask counts as it does on one device.
Examples that only fill a batch up to the shape that a TPU needs count nothing.
Invariant: the layers are as the user made them before and afterwards.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches
from tfdist.strategies.strategy import Strategy
from tfdist.training.step.lockstep import meet

MOMENTS = "_moments"  # the private method of Keras's layer that is replaced; a test fails when Keras changes it
Moments = Callable[[tf.Tensor, tf.Tensor | None], tuple[tf.Tensor, tf.Tensor]]
Sum = Callable[[tf.Tensor], tf.Tensor]


class _Pass(threading.local):
    """The forward pass of this thread; MirroredStrategy has one for each replica.

    Attributes:
      shares: float32 [n], how much each of its examples counts; None: one.
      weight: float32 scalar, of this replica's loss in the mean of all replicas' losses; None: losses are sums.
    """

    shares: tf.Tensor | None = None
    weight: tf.Tensor | None = None


_pass = _Pass()


def batch_norm_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The model's batch normalization layers, at any depth."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def is_synchronized(layer: keras.layers.BatchNormalization) -> bool:
    """Whether the layer's statistics are taken over all replicas."""
    return layer.synchronized or MOMENTS in vars(layer)


def microbatch_note(model: keras.Model, plan: BatchPlan) -> str | None:
    """Returns a note on a model that normalizes by statistics of microbatches; None for any other."""
    layers = [layer.name for layer in batch_norm_layers(model) if layer.trainable]
    if plan.num_microbatches == 1 or not layers:
        return None
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return (
        f"Batch normalization ({layers[0]}{more}) takes the statistics of each of the {plan.num_microbatches} "
        f"microbatches, not of the whole batch of {plan.global_batch_size}: with another train.num_microbatches this "
        "is another training."
    )


@contextlib.contextmanager
def _bind(name: str, value: tf.Tensor | None) -> Iterator[None]:
    """Sets an attribute of this thread's pass while it lasts."""
    before = getattr(_pass, name)
    setattr(_pass, name, value)
    try:
        yield
    finally:
        setattr(_pass, name, before)


@contextlib.contextmanager
def example_weights(shares: tf.Tensor | None) -> Iterator[None]:
    """Sets how much each example counts in a forward pass, float32 [n]; None: one each."""
    with _bind("shares", shares):
        yield


@contextlib.contextmanager
def weighted_reductions(weight: tf.Tensor | None) -> Iterator[None]:
    """Sets how much a pass's loss counts in the mean of the replicas' losses, float32; None: in their sum."""
    with _bind("weight", weight):
        yield


def synchronize(
    model: keras.Model,
    strategy: Strategy,
    patches: Patches,
    *,
    wanted: bool,
    pads: bool = False,
    in_parts: bool = False,
) -> int:
    """Has batch normalization layers compute their statistics over all replicas.

    Those with `synchronized=True` do so whether it is `wanted` or not; a subclass that takes its statistics in a way of
    its own is left alone. Where a batch `pads`, what fills it is left out of the statistics of all. With `in_parts` a
    replica's share of a batch comes in parts, computed `side_by_side`, and statistics are those of all.
    Returns how many layers that changed.
    """
    kerass = getattr(keras.layers.BatchNormalization, MOMENTS)
    wanted = wanted and strategy.topology.num_replicas > 1
    layers = [layer for layer in batch_norm_layers(model) if getattr(type(layer), MOMENTS) is kerass]
    changed = [layer for layer in layers if wanted or layer.synchronized or pads or in_parts]
    for layer in changed:
        add = _sum_over_replicas if wanted or layer.synchronized else tf.identity
        patches.replace(layer, _moments=_moments_of(layer, _sum_over_parts if in_parts else add, pads=pads))
    return len(changed)


def _moments_of(layer: keras.layers.BatchNormalization, add: Sum, *, pads: bool) -> Moments:
    """Builds what replaces the layer's own method; with `pads`, shares tell padding from examples."""

    def moments(inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        inputs = tf.convert_to_tensor(inputs)
        axes = [axis for axis in range(inputs.shape.rank) if axis != layer.axis % inputs.shape.rank]
        shares = _pass.shares if pads else None
        if shares is None:
            return global_moments(inputs, mask, axes, add=add)[:2]
        if shares.shape[0] != inputs.shape[0]:
            raise UserError(
                f"The batch normalization {layer.name!r} gets {inputs.shape[0]} rows of {shares.shape[0]} examples, so "
                "it cannot leave out those that pad a last batch. Keep the examples as the first axis there."
            )
        mean, variance, count = global_moments(inputs, mask, axes, shares, add=add)
        counts = count > 0.0  # a microbatch, or without synchronization a replica, may hold padding alone
        return tf.where(counts, mean, layer.moving_mean), tf.where(counts, variance, layer.moving_variance)

    return moments


def global_moments(
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
    axes: Sequence[int],
    shares: tf.Tensor | None = None,
    *,
    add: Sum | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Mean and biased variance over `axes` of the global batch; in replica context, elsewhere of `inputs` alone.

    Two reductions: of sums and counts, then of the squared distances from the global mean. The gradient is exact: that
    of the second through the mean is a multiple of Σ(x − mean), which is zero.

    Args:
      inputs: [n, …], float32 or float64.
      mask: [n, …], one axis fewer, false where a place does not count; None counts all.
      axes: all axes of `inputs` but the channels'.
      shares: float32 [n], how much each row counts; None: one.
      add: sums over the replicas; None: over all of the run.

    Returns:
      Two vectors of the channels' length, and what counted: a scalar, or with a mask one number for each channel.
    """
    add = add or _sum_over_replicas
    rank = inputs.shape.rank
    weights = None if shares is None else tf.reshape(tf.cast(shares, inputs.dtype), [-1, *[1] * (rank - 1)])
    if mask is not None:
        counted = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
        inputs = tf.where(counted, inputs, tf.zeros_like(inputs))
        weights = tf.cast(counted, inputs.dtype) * (1.0 if weights is None else weights)
        counts = tf.reduce_sum(weights, axes)
    else:
        along = tf.constant(axes if weights is None else axes[1:], tf.int32)
        places = tf.reduce_prod(tf.gather(tf.shape(inputs), along))
        counts = tf.cast(places, inputs.dtype)[tf.newaxis] * (1.0 if weights is None else tf.reduce_sum(weights))
    sums = tf.reduce_sum(inputs if weights is None else inputs * weights, axes)
    sums, counts = tf.split(add(tf.concat([sums, counts], 0)), [tf.size(sums), tf.size(counts)])
    divisors = counts if mask is None else counts + keras.config.epsilon()  # as Keras's layer does
    mean = tf.math.divide_no_nan(sums, divisors)
    center = tf.stop_gradient(tf.reshape(mean, [1 if axis in axes else -1 for axis in range(rank)]))
    distances = tf.math.squared_difference(inputs, center)
    if weights is not None:
        distances *= weights
    return mean, tf.math.divide_no_nan(add(tf.reduce_sum(distances, axes)), divisors), counts


def _sum_over_parts(vector: tf.Tensor) -> tf.Tensor:
    return tf.custom_gradient(lambda own: (meet(own), meet))(vector)  # the gradient of a sum is the sum of gradients


def _sum_over_replicas(vector: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    if context is None:
        return vector
    weight = _pass.weight
    if weight is None:
        return context.all_reduce(tf.distribute.ReduceOp.SUM, vector)

    @tf.custom_gradient
    def add(vector: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        """The gradient of this replica's loss, which counts `weight`, comes from the losses of all."""

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            scale = tf.cast(weight, upstream.dtype)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, upstream * scale) / scale

        return context.all_reduce(tf.distribute.ReduceOp.SUM, vector), gradient

    return add(vector)
