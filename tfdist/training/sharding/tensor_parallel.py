"""Layers of which each replica has some columns, which it computes for the rows of all replicas.

Before such a layer the replicas gather their rows, after it they exchange columns for rows; so all around it stays as
it is, and weights, gradients and slots stay where they are. It sends what goes in and out where `sharded_weights.py`
sends weights: less where these are larger than a batch's activations, as a vocabulary's are (after Shoeybi et al.,
"Megatron-LM", 2019, whose replicas hold the same rows). Invariant: a training takes the steps that it would take
without, but for the order in which some sums are added.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError, suggest
from tfdist.keras_patches.patches import Patches
from tfdist.strategies.strategy import Strategy
from tfdist.training.sharding.sharded_weights import call_with_values, piece
from tfdist.training.sharding.shards import Shards

SETTING = "train.sharding"


@dataclasses.dataclass(frozen=True)
class Split:
    """A layer's variable that is split.

    Attributes:
      layer: of Keras.
      variable: its kernel, or its embeddings.
      axis: of the variable, along which it is cut.
      output_axis: of the layer's output, whose columns are of that axis.
    """

    layer: keras.layers.Layer
    variable: keras.Variable
    axis: int
    output_axis: int


def choose_splits(model: keras.Model, patterns: Sequence[str], count: int) -> list[Split]:
    """Chooses the variables to split into `count` slices: all of layers with such names, and of layers in them.

    Args:
      model: built; its variables may have no values yet.
      patterns: as file names have them, 'mlp_*'.
      count: of slices.

    Raises:
      UserError: no layer is called so, or none of them can be cut.
    """
    found: dict[int, Split] = {}
    layers = list(model._flatten_layers(include_self=False))
    for pattern in patterns:
        matching = [layer for layer in layers if fnmatch.fnmatchcase(layer.name, pattern)]
        inside = [each for layer in matching for each in layer._flatten_layers()]
        splits = {id(each): split for each in inside if (split := _split(each, count)) is not None}
        if not splits:
            names = list(dict.fromkeys(layer.name for layer in layers if layer.trainable_variables))
            raise UserError(
                f"{SETTING} names {pattern!r}, and no layer of that name, nor one inside it, can be split. Name Dense, "
                f"EinsumDense or Embedding layers whose columns {count} replicas can share, without a regularizer or "
                f"constraint.{suggest(pattern, names)} There are {', '.join(names[:20])}."
            )
        found |= splits
    return list(found.values())


def _split(layer: keras.layers.Layer, count: int) -> Split | None:
    """How a layer is cut; None if it cannot be."""
    if not layer.trainable or not layer.built or type(layer).call not in _LOCAL:
        return None
    plain = not getattr(layer, "lora_enabled", False) and layer.quantization_mode is None
    axis, output_axis = 1, -1
    if isinstance(layer, keras.layers.EinsumDense):
        axes = _einsum_axes(layer.equation, layer.kernel.shape, count)
        if axes is None:
            return None
        axis, output_axis = axes
    variable = layer.embeddings if isinstance(layer, keras.layers.Embedding) else layer.kernel
    free = variable.regularizer is None and variable.constraint is None
    return Split(layer, variable, axis, output_axis) if plain and free and variable.shape[axis] % count == 0 else None


def _einsum_axes(equation: str, shape: Sequence[int], count: int) -> tuple[int, int] | None:
    """The kernel's axis to cut, and the output's; None where rows are not the first axis, or nothing can be cut."""
    match = re.fullmatch(r"(\w+),(\w+)->(\w+)", equation)
    if match is None:
        return None
    given, kernel, output = match.groups()
    if given[0] != output[0] or given[0] in kernel:
        return None
    for axis, label in enumerate(kernel):
        if label in output and label not in given and shape[axis] % count == 0:
            return axis, output.index(label)
    return None


_LOCAL: dict[Any, Callable[[Any, tf.Tensor, tf.Tensor], tf.Tensor]] = {
    keras.layers.Dense.call: lambda layer, inputs, kernel: keras.ops.matmul(inputs, kernel),
    keras.layers.EinsumDense.call: lambda layer, inputs, kernel: keras.ops.einsum(layer.equation, inputs, kernel),
    keras.layers.Embedding.call: lambda _, indices, kernel: keras.ops.take(kernel, tf.cast(indices, "int32"), axis=0),
}
"""What a layer computes of its inputs and some columns; what comes after is of each number by itself."""


def split_layers(splits: Sequence[Split], strategy: Strategy, shards: Shards, patches: Patches) -> None:
    """Has the layers compute with their slices whenever they are called."""
    for split in splits:
        patches.replace(split.layer, call=_build_split_call(split, split.layer.call, strategy, shards))


def _build_split_call(
    split: Split, inner: Callable[..., Any], strategy: Strategy, shards: Shards
) -> Callable[..., Any]:
    layer, variable = split.layer, split.variable
    local = _LOCAL[type(layer).call]

    def call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, keras.KerasTensor):  # for shapes alone
            return call_with_values(
                [variable], [tf.zeros(variable.shape, variable.dtype)], inner, (inputs, *args), kwargs
            )
        columns = tf.cast(piece(shards, variable), layer.compute_dtype)
        outputs = _columns_for_rows(local(layer, _rows_of_all(inputs, strategy), columns), strategy, split.output_axis)
        if getattr(layer, "bias", None) is not None:
            outputs = keras.ops.add(outputs, layer.bias)
        activation = getattr(layer, "activation", None)
        return outputs if activation is None else activation(outputs)

    return call


def _rows_of_all(inputs: tf.Tensor, strategy: Strategy) -> tf.Tensor:
    """[Σ n, …] of every replica's [n, …]; the gradients of all flow back, summed."""
    count = strategy.topology.num_replicas

    @tf.custom_gradient
    def gather(inputs: tf.Tensor) -> Any:
        shape = tf.shape(inputs)
        rows = strategy.all_gather(tf.reshape(inputs, [-1]), name=f"rows.{inputs.dtype.name}")

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            by_replica = tf.reshape(gradient, [count, -1])
            return tf.reshape(strategy.reduce_scatter(by_replica, name=f"rows.{gradient.dtype.name}"), shape)

        whole = tf.reshape(rows, tf.concat([shape[:1] * count, shape[1:]], axis=0))
        return tf.ensure_shape(whole, [None, *inputs.shape[1:]]), backward

    return gather(inputs)


def _columns_for_rows(outputs: tf.Tensor, strategy: Strategy, axis: int) -> tf.Tensor:
    """[n, …] with the columns of all replicas, of this one's columns of all rows, [Σ n, …]."""
    count, axis = strategy.topology.num_replicas, axis % outputs.shape.rank

    def exchange_parts(rows: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
        """Part r of the leading axis to replica r; what comes, in the order of the replicas, [count, *shape]."""
        name = f"columns.{rows.dtype.name}"
        flat = strategy.all_to_all(tf.reshape(rows, [count, -1]), name=name)
        return tf.reshape(flat, tf.concat([[count], shape], axis=0))

    @tf.custom_gradient
    def exchange(outputs: tf.Tensor) -> Any:
        shape = tf.concat([tf.shape(outputs)[:1] // count, tf.shape(outputs)[1:]], axis=0)
        whole = tf.concat(tf.unstack(exchange_parts(outputs, shape), count), axis)

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            parts = tf.stack(tf.split(gradient, count, axis))
            return tf.reshape(exchange_parts(parts, shape), tf.shape(outputs))

        static = [None, *outputs.shape[1:]]
        static[axis] = outputs.shape[axis] * count
        return tf.ensure_shape(whole, static), backward

    return exchange(outputs)
