"""What layers keep of a forward pass: variables that they write, and losses that they add.

Values that layers assign follow the variable's `aggregation` under every strategy. TensorFlow's strategies aggregate
what is assigned, and two things are left: Keras makes `assign_add(n)` of a variable with aggregation "sum" an
assignment of the sum, so that the old value is counted once a replica; and the first replica is each worker's own.
Horovod's variables are plain ones, and aggregate nothing.

Invariant: a step that is skipped leaves no trace in the variables, and no replica sees another's losses. Whatever
replicas there are, a variable of "sum" gets the sum of what they assign or add, of "mean" the mean, of
"only_first_replica" what the run's first replica assigns; with "none" each keeps its own, and the chief's first is
saved.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_patches.patches import Patches
from tfdist.strategies.strategy import Strategy
from tfdist.training.step.precision import as_tf_function
from tfdist.training.step.randomness import seed_generators

Assign = Callable[[Any], Any]
ROUNDING = 1e-5  # of a value that replicas compute alike
ADDED, FIRST, NONE = "sum", "only_first_replica", "none"


def moving_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns what a forward pass may change: batch statistics, seeds, a layer's own counts; no frozen weights."""
    own = layer_variables(model._flatten_layers())
    return list({id(v): v for v in [*own, *(generator.state for generator in seed_generators(model))]}.values())


def layer_variables(layers: Iterable[keras.Layer]) -> list[keras.Variable]:
    """Returns what layers may write in a forward pass, but for seeds."""
    return list({id(v): v for layer in layers for v in layer._non_trainable_variables}.values())


def unaggregated_variables(model: keras.Model) -> list[keras.Variable]:
    """Variables that layers may write and that say no aggregation, of which each replica has its own.

    Batch normalization's are left out: what they mean follows from whether it is synchronized.
    """
    layers = (each for each in model._flatten_layers() if not isinstance(each, keras.layers.BatchNormalization))
    return [v for v in layer_variables(layers) if v.aggregation == NONE and v.dtype != "string"]


class ReplicaStates:
    """The variables of which each replica has its own, of `unaggregated_variables`."""

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        self._strategy = strategy
        self._variables = unaggregated_variables(model)
        self._sum = as_tf_function(lambda: strategy.first_local(strategy.run(self._sum_over_replicas)))

    def find_differing(self) -> list[str]:
        """Finds the variables that are not the same on all replicas, by path. A collective, where there are any."""
        if not self._variables or self._strategy.topology.num_replicas == 1:
            return []
        sums, squares = self._sum().numpy() / self._strategy.topology.num_replicas
        differs = squares - sums**2 > ROUNDING**2 * squares
        return [v.path for v, each in zip(self._variables, differs.tolist(), strict=True) if each]

    def _sum_over_replicas(self) -> tf.Tensor:
        own = tf.stack([tf.reduce_sum(tf.cast(v.value, tf.float64)) for v in self._variables])
        return self._strategy.sum_over_replicas([tf.stack([own, own**2])])[0]


def layer_losses(model: keras.Model) -> tuple[list[Any], list[Any]]:
    """Returns what the model's last call added to its loss: by the examples, and by the weights alone.

    `Model.losses` ends with one penalty for each trainable variable that has a regularizer.
    """
    losses = list(model.losses)
    num_penalties = sum(v.regularizer is not None for v in model.trainable_variables)
    return losses[: len(losses) - num_penalties], losses[len(losses) - num_penalties :]


def map_penalized(model: keras.Model) -> None:
    """Maps weights that have a penalty to themselves in the `keras.StatelessScope`, which computes the penalties."""
    for variable in model.trainable_variables:
        if variable.regularizer is not None:
            variable.assign(variable.value)


def _separate_losses(model: keras.Model, patches: Patches) -> None:
    """Keeps `add_loss` and activity regularizers of each replica apart.

    MirroredStrategy calls the same layers on a thread for each replica, and changes threads at every reduction, so in
    the middle of the pass where batch normalization is synchronized.
    """
    for layer in model._flatten_layers():
        patches.replace(layer, _losses=ThreadLosses(), _loss_ids=ThreadIds())


class ThreadLosses(threading.local, collections.UserList[Any]):
    """A list of a layer's losses; every thread has its own."""

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return list, ()  # a copy of the layer has a list again


class ThreadIds(ThreadLosses):
    """A layer's set of loss ids, of every thread its own, where `keras.StatelessScope` holds them."""

    def add(self, identity: int) -> None:
        self.append(identity)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return set, ()


def aggregated_variables(model: keras.Model) -> list[keras.Variable]:
    """Variables of the model's layers that are not trained and say how they aggregate."""
    return [v for v in layer_variables(model._flatten_layers()) if v.aggregation != NONE]


def patch_layers(model: keras.Model, strategy: Strategy, patches: Patches) -> None:
    """Makes what replicas assign to such variables the same under every strategy, and keeps their losses apart."""
    if strategy.topology.num_local_replicas > 1:
        _separate_losses(model, patches)
    if strategy.topology.num_replicas == 1:
        return
    for variable in aggregated_variables(model):
        assign = variable.assign
        if variable.aggregation == ADDED:
            for name, sign in (("assign_add", 1), ("assign_sub", -1)):
                add = functools.partial(_add_on_replica, variable, assign, strategy, sign)
                patches.replace(variable, **{name: _on_replicas(getattr(variable, name), add)})
        on_replica = functools.partial(_assign_on_replica, variable, assign, strategy)
        patches.replace(variable, assign=_on_replicas(assign, on_replica))


def _on_replicas(elsewhere: Assign, on_replica: Assign) -> Assign:
    """Chooses by where it is called: a callback, say, assigns for all replicas at once."""

    def assign(value: Any) -> Any:
        is_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        return on_replica(value) if is_replica else elsewhere(value)

    return assign


def _assign_on_replica(variable: keras.Variable, assign: Assign, strategy: Strategy, value: Any) -> Any:
    return assign(_reduce_values(_to_tensor(value, variable), variable, strategy))


def _add_on_replica(variable: keras.Variable, assign: Assign, strategy: Strategy, sign: int, value: Any) -> Any:
    added = sign * _to_tensor(value, variable)
    if _aggregates_itself(variable):
        return variable.value.assign_add(added)
    return assign(variable.value + _reduce_values(added, variable, strategy))


def _reduce_values(value: tf.Tensor, variable: keras.Variable, strategy: Strategy) -> tf.Tensor:
    """What to assign on this replica so that TensorFlow's own aggregation, where there is one, gives what is wanted."""
    if variable.aggregation == FIRST:
        return strategy.from_first_replica(value)
    if _aggregates_itself(variable):
        return value
    (total,) = strategy.sum_over_replicas([value])
    return total if variable.aggregation == ADDED else total / tf.cast(strategy.topology.num_replicas, total.dtype)


def _aggregates_itself(variable: keras.Variable) -> bool:
    return isinstance(variable.value, tf.distribute.DistributedValues)


def _to_tensor(value: Any, variable: keras.Variable) -> tf.Tensor:
    return tf.cast(keras.ops.convert_to_tensor(value), variable.value.dtype)
