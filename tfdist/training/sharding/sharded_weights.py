"""Layers whose weights lie at one replica each, and are gathered while a pass needs them.

A layer's call becomes a function of its inputs and of each replica's own variables: gathered before it computes,
dropped after, gathered again in the backward pass, where the layer is computed again (`recipes/recompute.py`) and the
sums of its gradients go to their owners (Rajbhandari et al., "ZeRO", 2020, stage 3). The next layer's weights come
while this one computes, in both directions, so that those of two are whole at once. Invariant: a training takes the
steps that it would take with gradients sharded alone, but for the order in which some sums are added.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_patches.patches import Patches
from tfdist.recipes.recompute import RecomputedCall
from tfdist.training.sharding.shards import Shards

# Replicas are traced by threads. `pieces` are what a pass takes its gradients by, `calls` those of its layers so far.
_pass = threading.local()


@contextlib.contextmanager
def pieces(shards: Shards | None, variables: Sequence[keras.Variable]) -> Iterator[dict[int, tf.Tensor]]:
    """Yields, by id, the tensors that gradients are taken by instead of sharded variables; in replica context.

    Each is the variable at its owner, and empty elsewhere.
    """
    found = {} if shards is None else {id(v): shards.own_value(v) for v in variables if shards.is_sharded(v)}
    before = getattr(_pass, "pieces", None), getattr(_pass, "calls", [])
    _pass.pieces, _pass.calls = found, []
    try:
        yield found
    finally:
        _pass.pieces, _pass.calls = before


def piece(shards: Shards, variable: keras.Variable) -> tf.Tensor:
    """Returns this replica's part of a sharded variable; within a pass, the tensor that it takes the gradient by."""
    found = getattr(_pass, "pieces", None) or {}
    return found[id(variable)] if id(variable) in found else shards.own_value(variable)


def gather_weights(layers: Sequence[keras.layers.Layer], shards: Shards, patches: Patches) -> None:
    """Has the layers gather their weights whenever they are called."""
    for layer in layers:
        patches.replace(layer, call=_build_gathering_call(layer, layer.call, shards))


def _build_gathering_call(layer: keras.layers.Layer, inner: Callable[..., Any], shards: Shards) -> Callable[..., Any]:
    trained = list(layer.trainable_variables)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = tf.nest.flatten((args, kwargs))
        if any(isinstance(each, keras.KerasTensor) for each in given):  # for shapes alone
            return call_with_values(trained, [tf.zeros(v.shape, v.dtype) for v in trained], inner, args, kwargs)
        if kwargs.get("training") is False or getattr(_pass, "pieces", None) is None:
            inputs = [each for each in given if tf.is_tensor(each)]
            own = [shards.own_value(variable) for variable in trained]
            return call_with_values(trained, _gather(shards, trained, own, after=inputs), inner, args, kwargs)
        return _GatheredVariable(layer, inner, args, kwargs, shards)()

    return call


def call_with_values(
    variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], inner: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls a layer with other values in its variables' place."""
    with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
        return inner(*args, **kwargs)


class _GatheredVariable(RecomputedCall):
    """One call of such a layer on one replica, in a pass that gradients are taken of."""

    def __init__(
        self, layer: keras.layers.Layer, inner: Callable[..., Any], args: Any, kwargs: Any, shards: Shards
    ) -> None:
        super().__init__(layer, inner, args, kwargs)
        self._shards = shards
        self._inputs: Sequence[tf.Tensor] = []
        self._own: Sequence[tf.Tensor] = []
        self._ahead: Sequence[tf.Tensor] | None = None  # the weights for the second pass
        self._earlier: _GatheredVariable | None = _pass.calls[-1] if _pass.calls else None
        _pass.calls.append(self)

    def read_weights(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        return [_pass.pieces[id(variable)] for variable in variables]

    def gather_weights(self, inputs: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        if self.is_second_pass:
            return _gather(self._shards, self.trained, values, after=inputs, ahead=self._ahead)
        self._inputs, self._own = inputs, values
        earlier = self._earlier
        after = inputs if earlier is None or not _gather_in_graph(earlier._inputs, inputs) else earlier._inputs
        return _gather(self._shards, self.trained, values, after=after)

    def _backward(self, values: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> list[Any]:
        earlier = self._earlier
        if earlier is not None and _gather_in_graph(earlier._inputs, gradients):
            # Traced before this one's gradients are sent, as MultiWorker's collectives go in the order of the trace.
            with tf.control_dependencies(gradients):
                earlier._ahead = self._shards.gather_variables(earlier._own, earlier.trained)
        return super()._backward(values, gradients)


def _gather_in_graph(some: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> bool:
    """Whether they can wait for each other, which what is computed within a condition cannot from outside."""
    return len({id(each.graph) for each in (*some, *others)}) == 1


def _gather(
    shards: Shards,
    variables: Sequence[keras.Variable],
    own: Sequence[tf.Tensor],
    *,
    after: Sequence[tf.Tensor],
    ahead: Sequence[tf.Tensor] | None = None,
) -> list[tf.Tensor]:
    """The whole weights, whose gradients flow back, summed, to the owners.

    Args:
      shards: of the model's variables.
      variables: of a layer.
      own: this replica's, and something empty for each of the others'.
      after: what is there before they are gathered.
      ahead: they themselves, where they have been gathered.
    """

    @tf.custom_gradient
    def gather(*own: tf.Tensor) -> Any:
        if ahead is not None:
            whole = [tf.identity(each) for each in ahead]
        else:
            with tf.control_dependencies(after):
                whole = shards.gather_variables(own, variables)

        def backward(*gradients: tf.Tensor, variables_: Any = None) -> list[tf.Tensor]:
            del variables_
            return shards.reduce_to_owners(gradients, variables, name="block")[0]

        return whole, backward

    return list(gather(*own))
