"""A model whose layers lie and compute on several devices of one process, in stages.

A stage's microbatch waits for nothing but the stage before, so that TensorFlow computes several at a time, each at its
stage (Huang et al., "GPipe", 2019). A layer keeps its inputs alone and computes the rest again in the backward pass
(`recipes/recompute.py`), where it lies. Invariant: a training takes the steps that it takes on one device with as many
microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError, suggest
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.recompute import RecomputedCall


def layers_by_device(
    model: keras.Model, stages: Sequence[str], devices: Sequence[str]
) -> list[tuple[keras.layers.Layer, str]]:
    """The model's own layers in their order, each with its device.

    Args:
      model: built; its variables may have no values yet.
      stages: names of the layers at which the second stage begins, the third …
      devices: of each stage.

    Raises:
      UserError: there are no such layers, or not in this order.
    """
    layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    names = [layer.name for layer in layers]
    for name in stages:
        if name not in names:
            raise UserError(
                f"Pipelined.stages names {name!r}, and the model has no layer that is called so.{suggest(name, names)} "
                f"There are {', '.join(names[:20])}."
            )
    begins = [names.index(name) for name in stages]
    if begins != sorted(set(begins)) or begins[0] == 0:
        raise UserError(
            f"pipelined.Pipelined.stages = {list(stages)} are to be layers in their order in the model, each once, and "
            f"not its first; that is {', '.join(names[:20])}."
        )
    return [(layer, devices[sum(begin <= index for begin in begins)]) for index, layer in enumerate(layers)]


def map_variable_devices(layer_devices: Sequence[tuple[keras.layers.Layer, str]]) -> Mapping[int, str]:
    """The devices of the layers' variables, by their ids; a variable that several have is where the first one is."""
    return {id(v): device for layer, device in reversed(layer_devices) for v in layer.variables}


def compute_in_stages(layer_devices: Sequence[tuple[keras.layers.Layer, str]], patches: Patches) -> None:
    """Has each layer compute on its device whenever it is called."""
    for layer, device in layer_devices:
        patches.replace(layer, call=_build_staged_call(layer, layer.call, device))


def _build_staged_call(layer: keras.layers.Layer, inner: Callable[..., Any], device: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = tf.nest.flatten((args, kwargs))
        if any(isinstance(each, keras.KerasTensor) for each in given):
            return inner(*args, **kwargs)
        with tf.device(device):
            floats = any(tf.is_tensor(each) and each.dtype.is_floating for each in given)
            if kwargs.get("training") is False or not (floats or layer.trainable_variables):
                return inner(*args, **kwargs)
            return _AtStage(layer, inner, args, kwargs, device)()

    return call


class _AtStage(RecomputedCall):
    """One call of such a layer."""

    def __init__(
        self, layer: keras.layers.Layer, inner: Callable[..., Any], args: Any, kwargs: Any, device: str
    ) -> None:
        super().__init__(layer, inner, args, kwargs)
        self._device = device

    def _backward(self, values: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> list[Any]:
        with tf.device(self._device):
            return super()._backward(values, gradients)
