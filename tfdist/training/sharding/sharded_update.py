"""Applies one step's gradients where the optimizer's state is: each variable's at its owner, and the weights go to all.

Invariant: where every replica has the gradients of all variables, the weights are bit for bit those of `Update`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.optimizers import Lars
from tfdist.strategies.strategy import Strategy
from tfdist.training.sharding.shards import Shards
from tfdist.training.step.optimizer import Gradients, Update, parts

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


class ShardedUpdate(Update):
    """The update of sharded variables by a step's gradients; called outside of any replica context.

    Args:
      strategy: connected.
      optimizer: from `build_optimizer`, for what is owned here.
      shards: of the model's variables.
      **options: of `Update`.
    """

    def __init__(
        self, strategy: Strategy, optimizer: keras.optimizers.Optimizer, shards: Shards, **options: Any
    ) -> None:
        super().__init__(strategy, optimizer, **options)
        self._shards = shards
        self._run = self._run_where_slots_are
        self._run_everywhere = self._run_where_slots_are

    def __call__(self, gradients: Gradients, variables: Sequence[keras.Variable]) -> tf.Tensor:
        optimizer, shards = self._optimizer, self._shards
        clipped = self._clip_gradients(gradients)
        own = shards.gradients_of_owned(clipped, variables)
        clips = ("global_clipnorm",) if shards.scatters else CLIPPING
        with Patches() as patches:
            patches.replace(optimizer, **dict.fromkeys(clips))
            done = super().__call__(own, shards.list_own(variables))
        shards.spread(variables)
        return done

    def _clip_gradients(self, gradients: Gradients) -> Sequence[Any]:
        """Clips gradients on each replica; where a replica lacks some, by their global norm alone."""
        optimizer = self._optimizer
        if not self._shards.scatters:
            if not any(getattr(optimizer, name) for name in CLIPPING):
                return gradients
            return self._strategy.run(lambda own: optimizer._clip_gradients(own), args=(list(gradients),))
        if not optimizer.global_clipnorm:
            return gradients

        def on_replica(own: Gradients) -> list[Any]:
            squares = tf.add_n([tf.reduce_sum(tf.square(tf.cast(each, tf.float32))) for each in own])
            (total,) = self._strategy.sum_over_replicas([squares])
            clipped, _ = tf.clip_by_global_norm(own, optimizer.global_clipnorm, use_norm=tf.sqrt(total))
            return clipped

        return self._strategy.run(on_replica, args=(list(gradients),))

    def _run_where_slots_are(self, function: Callable[..., None], args: tuple[Any, ...] = ()) -> None:
        with tf.device(self._shards.host) if self._shards.host else contextlib.nullcontext():
            function(*args)


def build_sharded(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], patches: Patches, shards: Shards
) -> None:
    """Builds an optimizer, made outside of the strategy's scope, for what is owned here, and has it end as one.

    Raises:
      UserError: it is several in one.
    """
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise UserError(
            "train.sharding is for one optimizer, and train.optimizer gives a MultiOptimizer. Give rates and decays by "
            "groups (recipes/groups.py) instead, or leave train.sharding out."
        )
    whole = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon, Lars)
    if shards.splits and (isinstance(optimizer, whole) or optimizer.clipnorm):
        what = f"clipnorm = {optimizer.clipnorm}" if optimizer.clipnorm else type(optimizer).__name__
        raise UserError(
            f"train.sharding, by layers, leaves each replica a slice of a variable, and {what} looks at whole ones. "
            "Take an optimizer that treats each number by itself, such as Adam, and global_clipnorm."
        )
    if shards.host is None:
        _update_where_variables_are(optimizer, patches)
    with _slots_on(shards.host, optimizer) if shards.host else contextlib.nullcontext():
        optimizer.build(shards.list_own(variables))
    finalize = optimizer.finalize_variable_values

    def end(var_list: Sequence[keras.Variable]) -> None:
        finalize(shards.list_own(var_list))
        if optimizer.use_ema:
            shards.spread(var_list)

    patches.replace(optimizer, finalize_variable_values=end)


def build_on_stages(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], patches: Patches
) -> None:
    """Builds an optimizer, or several in one, for variables that lie on several devices of one process."""
    for one in parts(optimizer):
        _update_where_variables_are(one, patches)
    optimizer.build(variables)


def _update_where_variables_are(optimizer: keras.optimizers.Optimizer, patches: Patches) -> None:
    """Else the first device of a process would compute the updates of all."""
    inner = optimizer.update_step

    def update_step(gradient: Any, variable: tf.Variable, learning_rate: tf.Tensor) -> Any:
        with tf.device(variable.device):
            return inner(gradient, variable, learning_rate)

    patches.replace(optimizer, update_step=update_step)


@contextlib.contextmanager
def _slots_on(device: str, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Has the optimizer, which makes slots beside their variables, make them on a device."""
    inner = optimizer.add_variable_from_reference
    with tf.device(device):
        there = tf.Variable(0.0, trainable=False)

    def add(reference_variable: keras.Variable, *args: Any, **kwargs: Any) -> keras.Variable:
        beside = copy.copy(reference_variable)
        beside._value = there
        return inner(beside, *args, **kwargs)

    with Patches() as patches:
        patches.replace(optimizer, add_variable_from_reference=add)
        yield
