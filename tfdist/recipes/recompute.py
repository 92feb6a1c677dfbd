"""Gradient checkpointing: layers keep their inputs alone, and compute the rest again in the backward pass.

`tf.recompute_grad` draws another dropout mask the second time and moves batch statistics twice. Here a layer's call
becomes a function of its inputs, its weights, and the values that its seeds and statistics had: what these become is
assigned once, and the second pass computes with the same values as the first. Invariant: a training takes the same
steps, in less memory and more time. (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.)
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.variables import AutocastScope

from tfdist.errors import UserError, suggest
from tfdist.keras_patches.patches import Patches

AUTO = "auto"
LOGITS = "_keras_logits"  # of which Keras's activations made probabilities; its crossentropies go by them


def choose_layers(model: keras.Model, patterns: Sequence[str] | str) -> list[keras.layers.Layer]:
    """Returns the layers whose activations are recomputed in the backward pass.

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
        found = match_layers(inside, patterns, "train.recompute")
    held = {id(each) for layer in found for each in layer._flatten_layers(include_self=False)}
    return [layer for layer in {id(layer): layer for layer in found}.values() if id(layer) not in held]


def match_layers(
    layers: Sequence[keras.layers.Layer], patterns: Sequence[str], setting: str
) -> list[keras.layers.Layer]:
    """Returns the layers whose names match shell-style patterns, in the patterns' order.

    Raises:
      UserError: one of the patterns, which `setting` has, matches none.
    """
    found = []
    for pattern in patterns:
        matching = [layer for layer in layers if fnmatch.fnmatchcase(layer.name, pattern)]
        if not matching:
            names = list(dict.fromkeys(layer.name for layer in layers))
            raise UserError(
                f"{setting} names {pattern!r}, and no layer with variables has this name.{suggest(pattern, names)} "
                f"There are {', '.join(names[:20])}."
            )
        found += matching
    return found


def recompute_layers(model: keras.Model, patterns: Sequence[str] | str | None, patches: Patches) -> None:
    """Has the chosen layers computed again in backward passes that are traced from now on; None chooses none."""
    for layer in [] if patterns is None else choose_layers(model, patterns):
        patches.replace(layer, call=_wrap_layer_call(layer, layer.call))


def _wrap_layer_call(layer: keras.layers.Layer, inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = tf.nest.flatten((args, kwargs))
        if kwargs.get("training") is False or any(isinstance(each, keras.KerasTensor) for each in given):
            return inner(*args, **kwargs)
        return RecomputedCall(layer, inner, args, kwargs)()

    return call


class RecomputedCall:
    """Call of a layer on one replica, whose activations the backward pass recomputes.

    Args:
      layer: whose call it is.
      inner: the call itself.
      args, kwargs: of the call.
    """

    def __init__(self, layer: keras.layers.Layer, inner: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._layer, self._inner = layer, inner
        self._nest = (args, kwargs)
        self._given = tf.nest.flatten(self._nest)
        self._float_indices = [i for i, each in enumerate(self._given) if tf.is_tensor(each) and each.dtype.is_floating]
        self.trained = list(layer.trainable_variables)
        self._kept = list(layer.non_trainable_variables)
        self._before = [tf.identity(v.value) for v in self._kept]
        self._outputs: Any = None
        self._after: list[Any] = []
        autocasts = layer.autocast and layer.compute_dtype != layer.variable_dtype
        self._autocasts_to = layer.compute_dtype if autocasts else None  # in the second pass, too
        self.is_second_pass = False

    def read_weights(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Reads the tensors by which gradients are taken, for each variable that is trained."""
        return [tf.convert_to_tensor(variable.value) for variable in variables]

    def gather_weights(self, inputs: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """The weights, of what `read_weights` gave; in both passes, once the inputs are there."""
        del inputs
        return values

    def __call__(self) -> Any:
        weights = self.read_weights(self.trained)
        inputs = [self._given[i] for i in self._float_indices]
        flat = tf.custom_gradient(self._forward)(*inputs, *weights)
        for variable, value, before in zip(self._kept, self._after, self._before, strict=True):
            if value is not None and value is not before:
                variable.assign(value)
        found = tf.nest.flatten(flat)
        given = tf.nest.flatten(self._outputs)
        logits = iter(found[len(given) :])
        for one, output in zip(found, given, strict=False):
            _copy_mask(output, one)
            if hasattr(output, LOGITS):
                setattr(one, LOGITS, next(logits))
        return tf.nest.pack_sequence_as(self._outputs, found[: len(given)])

    def _forward(self, *values: tf.Tensor) -> Any:
        outputs, self._after = self._compute(values)
        self._outputs = outputs

        def backward(*gradients: tf.Tensor, variables: Any = None) -> list[Any]:
            del variables
            return self._backward(values, gradients)

        return _flatten(outputs), backward

    def _compute(self, values: Sequence[tf.Tensor]) -> tuple[Any, list[Any]]:
        """Computes the outputs for inputs and weights, and the new values of the variables that are not trained."""
        inputs = values[: len(self._float_indices)]
        weights = self.gather_weights(inputs, values[len(self._float_indices) :])
        given = list(self._given)
        for index, value in zip(self._float_indices, inputs, strict=True):
            _copy_mask(given[index], value)
            given[index] = value
        args, kwargs = tf.nest.pack_sequence_as(self._nest, given)
        mapping = [*zip(self.trained, weights, strict=True), *zip(self._kept, self._before, strict=True)]
        stateless = keras.StatelessScope(state_mapping=mapping, collect_losses=True)
        with AutocastScope(self._autocasts_to), stateless as scope:
            outputs = self._inner(*args, **kwargs)
        if scope.losses:
            raise UserError(
                f"The layer {self._layer.name!r} adds to the loss (add_loss, or an activity regularizer), which "
                "train.recompute would lose. Leave it out of train.recompute."
            )
        return outputs, [scope.get_current_value(v) for v in self._kept]

    def _backward(self, values: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> list[Any]:
        # What is computed again must wait for the gradients, and not look the same as the first pass to TensorFlow's
        # optimizer of graphs, which would keep that instead; nor to XLA's, for which a test of a number with itself
        # holds always. Control dependencies would do for the former, and cost 3 % of a transformer's step.
        one = tf.reshape(gradients[0], [-1])[:1]
        differs = tf.cast(tf.reduce_max(one), tf.bool)
        nothing = tf.where(tf.equal(differs, differs), 0.0, float("nan")) + tf.zeros([]) * tf.cast(one[0], tf.float32)
        with tf.control_dependencies(gradients):
            nothing = tf.identity(nothing)
        num_late = max(1, len(self._float_indices))  # all inputs; of a layer without one to differentiate by, a weight
        late = [value + tf.cast(nothing, value.dtype) for value in values[:num_late]]
        again = [*late, *map(tf.identity, values[num_late:])]
        with tf.GradientTape() as tape:
            tape.watch(again)
            self.is_second_pass = True
            outputs, _ = self._compute(again)
        found = tape.gradient(_flatten(outputs), again, output_gradients=list(gradients))
        found = [tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in found]
        there = [each for each in found if each is not None]
        with tf.control_dependencies(there):  # the layer before waits until this one's values are gone
            return [None if each is None else tf.identity(each) for each in found]


def _flatten(outputs: Any) -> list[tf.Tensor]:
    """The outputs, and behind them the logits of those that have them."""
    flat = tf.nest.flatten(outputs)
    return [*flat, *(getattr(each, LOGITS) for each in flat if hasattr(each, LOGITS))]


def _copy_mask(source: Any, target: tf.Tensor) -> None:
    """Leaves the Keras mask of a tensor on one that takes its place: layers within the layer go by it, and the loss."""
    if (mask := getattr(source, "_keras_mask", None)) is not None:
        target._keras_mask = mask
