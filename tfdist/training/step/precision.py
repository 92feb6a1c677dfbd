"""The type that is computed in, and the loss scale that float16 needs.

A float16 gradient below 6e-8 is zero. Multiplying the loss by a scale keeps small gradients alive; the scale doubles
after some steps without overflow and halves at each overflow (Micikevicius et al., "Mixed Precision Training", 2018,
https://arxiv.org/abs/1710.03740). The check sees the gradients summed over all replicas, so an overflow on any one of
them skips the step on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
INITIAL_SCALE = 2.0**15
STEPS_TO_DOUBLE = 2000


def set_precision(precision: str) -> None:
    """Sets what layers made from now on compute in, one of `POLICIES`; variables stay float32."""
    keras.config.set_dtype_policy(POLICIES[precision])


class LossScale:
    """A dynamic loss scale. Make it inside the strategy's scope; its two variables belong to the training's state.

    Args:
      batch_size: examples in a global batch. Losses are differentiated as sums over examples; the scale is that of
        their mean, since a float16 sum over a batch would leave float16's range sooner.
      initial: the first scale, a power of two so that scaling rounds nothing.
      steps_to_double: steps without overflow after which it doubles.
    """

    def __init__(self, batch_size: int, initial: float = INITIAL_SCALE, steps_to_double: int = STEPS_TO_DOUBLE) -> None:
        self.scale = keras.Variable(initial, dtype="float32", trainable=False, name="loss_scale")
        self.good_steps = keras.Variable(0, dtype="int32", trainable=False, name="loss_scale_good_steps")
        self._steps_to_double = steps_to_double
        self._sum_to_mean = 2.0 ** -(batch_size.bit_length() - 1)  # about 1 ÷ batch_size, and exact

    @property
    def variables(self) -> list[keras.Variable]:
        """The scale and the count of good steps, which a checkpoint holds."""
        return [self.scale, self.good_steps]

    def factor(self) -> tf.Tensor:
        """Returns the factor of a sum of losses before it is differentiated, float32 scalar."""
        return tf.convert_to_tensor(self.scale.value) * self._sum_to_mean

    def update(self, finite: tf.Tensor) -> None:
        """Takes note of one step; in replica context, with the same `finite` on every replica."""
        scale, good = tf.convert_to_tensor(self.scale.value), tf.convert_to_tensor(self.good_steps.value) + 1
        full = good >= self._steps_to_double
        grown = tf.where(full, tf.minimum(scale * 2.0, 2.0**24), scale)
        self.scale.value.assign(tf.where(finite, grown, tf.maximum(scale / 2.0, 1.0)))
        self.good_steps.value.assign(tf.where(finite & ~full, good, 0))


def factor_of(loss_scale: LossScale | None, fixed: float) -> tf.Tensor | float:
    """Returns the factor of the loss before it is differentiated: the dynamic scale, if any, and a fixed one."""
    return fixed if loss_scale is None else loss_scale.factor() * fixed


def as_tf_function(function: Callable[..., Any], *, reduce_retracing: bool = False) -> Any:
    """A `tf.function` of a method or a lambda, without AutoGraph.

    TensorFlow counts how often a piece of code is traced, and would warn in the fifth run of a process (a notebook, a
    sweep in one process) that it is traced too often. What has no code of its own is counted by itself.
    """
    return tf.function(functools.partial(function), reduce_retracing=reduce_retracing, autograph=False)


def can_lower(function: Callable[..., Any], specs: Any) -> bool:
    """Whether XLA has all that a function of such tensors, a nest of `tf.TensorSpec`s, needs; nothing is run."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    try:
        compiled.experimental_get_compiler_ir(*tf.nest.flatten(specs))(stage="hlo")
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, ValueError, TypeError):
        return False
    return True
