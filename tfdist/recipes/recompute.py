"""Gradient checkpointing: layers keep their inputs alone, and compute the rest again in the backward pass.

`tf.recompute_grad` draws another dropout mask the second time and moves batch statistics twice. Here a layer's call
becomes a function of its inputs, its weights, and the values that its seeds and statistics had: what these become is
assigned once, and the second pass computes with the same values as the first. Invariant: a training takes the same
steps, in less memory and more time. (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.)
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError, suggest

AUTO = "auto"


def chosen_layers(model: keras.Model, patterns: Sequence[str] | str) -> list[keras.layers.Layer]:
    """The layers to compute again.

    Args:
      model: built.
      patterns: of layers' names, as file names have them, 'block_*'; or 'auto': every layer of the model that holds
        layers of its own and variables to train.

    Raises:
      UserError: none is found.
    """
    inside = [layer for layer in model._flatten_layers(include_self=False) if layer.trainable_variables]
    if patterns == AUTO:
        found = [layer for layer in inside if len(list(layer._flatten_layers())) > 1]
        if not found:
            raise UserError(
                "train.recompute is 'auto', and no layer of the model holds layers of its own. Make its blocks layers "
                "or models, or name layers by patterns, ['block_*']."
            )
    else:
        found = []
        for pattern in patterns:
            matching = [layer for layer in inside if fnmatch.fnmatchcase(layer.name, pattern)]
            if not matching:
                names = list(dict.fromkeys(layer.name for layer in inside))
                raise UserError(
                    f"train.recompute names {pattern!r}, and no layer with variables to train is called so."
                    f"{suggest(pattern, names)} There are {', '.join(names[:20])}."
                )
            found += matching
    held = {id(each) for layer in found for each in layer._flatten_layers(include_self=False)}
    return [layer for layer in {id(layer): layer for layer in found}.values() if id(layer) not in held]


@contextlib.contextmanager
def recomputed(model: keras.Model, patterns: Sequence[str] | str | None) -> Iterator[None]:
    """While it lasts, the chosen layers are computed again in backward passes that are traced; None chooses none."""
    layers = [] if patterns is None else chosen_layers(model, patterns)
    for layer in layers:
        object.__setattr__(layer, "call", _computed_again(layer, layer.call))
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["call"]


def _computed_again(layer: keras.layers.Layer, inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = tf.nest.flatten((args, kwargs))
        if kwargs.get("training") is False or any(isinstance(each, keras.KerasTensor) for each in given):
            return inner(*args, **kwargs)
        return _Call(layer, inner, args, kwargs)()

    return call


class _Call:
    """One call of a layer on one replica.

    Args:
      layer: whose call it is.
      inner: the call itself.
      args, kwargs: of the call.
    """

    def __init__(self, layer: keras.layers.Layer, inner: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._layer, self._inner = layer, inner
        self._nest = (args, kwargs)
        self._given = tf.nest.flatten(self._nest)
        self._places = [i for i, each in enumerate(self._given) if tf.is_tensor(each) and each.dtype.is_floating]
        self._trained = list(layer.trainable_variables)
        self._kept = list(layer.non_trainable_variables)
        self._before = [tf.identity(v.value) for v in self._kept]
        self._outputs: Any = None
        self._after: list[Any] = []

    def __call__(self) -> Any:
        weights = [tf.convert_to_tensor(v.value) for v in self._trained]
        inputs = [self._given[i] for i in self._places]
        flat = tf.custom_gradient(self._forward)(*inputs, *weights)
        for variable, value, before in zip(self._kept, self._after, self._before, strict=True):
            if value is not None and value is not before:
                variable.assign(value)
        return tf.nest.pack_sequence_as(self._outputs, tf.nest.flatten(flat))

    def _forward(self, *values: tf.Tensor) -> Any:
        outputs, self._after = self._computed(values)
        self._outputs = outputs

        def backward(*gradients: tf.Tensor, variables: Any = None) -> list[Any]:
            del variables
            return self._backward(values, gradients)

        return tf.nest.flatten(outputs), backward

    def _computed(self, values: Sequence[tf.Tensor]) -> tuple[Any, list[Any]]:
        """The outputs for such inputs and weights, and what the variables that are not trained become."""
        inputs, weights = values[: len(self._places)], values[len(self._places) :]
        given = list(self._given)
        for place, value in zip(self._places, inputs, strict=True):
            given[place] = value
        args, kwargs = tf.nest.pack_sequence_as(self._nest, given)
        mapping = [*zip(self._trained, weights, strict=True), *zip(self._kept, self._before, strict=True)]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = self._inner(*args, **kwargs)
        if scope.losses:
            raise UserError(
                f"The layer {self._layer.name!r} adds to the loss (add_loss, or an activity regularizer), which "
                "train.recompute would lose. Leave it out of train.recompute."
            )
        return outputs, [scope.get_current_value(v) for v in self._kept]

    def _backward(self, values: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> list[Any]:
        # What is computed again must not look the same as the first pass to TensorFlow's optimizer of graphs, which
        # would keep that instead; nor to XLA's, for which a test of a number with itself holds always.
        one = tf.reshape(gradients[0], [-1])[:1]
        differs = tf.cast(tf.reduce_max(one), tf.bool)
        nothing = tf.where(tf.equal(differs, differs), 0.0, float("nan")) + tf.zeros([]) * tf.cast(one[0], tf.float32)
        with tf.control_dependencies(gradients):
            again = [tf.identity(value) for value in values]
        again[0] = again[0] + tf.cast(nothing, again[0].dtype)
        with tf.GradientTape() as tape:
            tape.watch(again)
            with tf.control_dependencies(gradients):
                outputs, _ = self._computed(again)
        found = tape.gradient(tf.nest.flatten(outputs), again, output_gradients=list(gradients))
        found = [tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in found]
        there = [each for each in found if each is not None]
        with tf.control_dependencies(there):  # the layer before waits until this one's values are gone
            return [None if each is None else tf.identity(each) for each in found]
