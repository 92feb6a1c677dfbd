"""Makes a Keras optimizer safe for gradients that are summed over the replicas before it sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import UserError


def check_optimizer_builder(builder: object) -> None:
    """Raises UserError where `builder` is no function or class that makes an optimizer."""
    if isinstance(builder, keras.optimizers.Optimizer):
        raise UserError(
            f"train.optimizer is a {type(builder).__name__} object; it must be made inside the strategy's scope. Write "
            f"@keras.optimizers.{type(builder).__name__} without parentheses."
        )
    if not callable(builder):
        raise UserError(
            f"train.optimizer is {builder!r}; write @keras.optimizers.Adam, or another, without parentheses."
        )


def build_optimizer(
    builder: Callable[[], keras.optimizers.Optimizer], model: keras.Model
) -> keras.optimizers.Optimizer:
    """The optimizer, with its slots for the model's variables. Call it inside the strategy's scope.

    Keras clips in `apply`; since the gradients it gets are those of the whole global batch already, `clipnorm`,
    `global_clipnorm` and `clipvalue` mean the same for every number of replicas.

    Raises:
      UserError: it is no optimizer builder, or does what the step does itself.
    """
    check_optimizer_builder(builder)
    optimizer = builder()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UserError(
            f"train.optimizer gave a {type(optimizer).__name__}; it must give a keras.optimizers.Optimizer."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None:
        raise UserError("Leave the loss scale out of train.optimizer: train.precision = 'float16' scales by itself.")
    if optimizer.gradient_accumulation_steps:
        raise UserError(
            f"gradient_accumulation_steps = {optimizer.gradient_accumulation_steps} in the optimizer does not work on "
            "several replicas. Leave it out and write train.num_microbatches."
        )
    optimizer.build(model.trainable_variables)
    return without_reduction(optimizer)


def without_reduction(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Keeps the optimizer from summing over the replicas once more what is summed already.

    The method belongs to Keras's TensorFlow optimizer and is private; tests/training/test_optimizer.py fails when a
    release of Keras changes it.
    """
    if not callable(getattr(optimizer, "_all_reduce_sum_gradients", None)):
        raise RuntimeError(
            f"keras {keras.__version__} has no Optimizer._all_reduce_sum_gradients: gradients would be summed twice. "
            "tfdist was written for the release that pyproject.toml names."
        )
    optimizer._all_reduce_sum_gradients = _as_they_are
    return optimizer


def _as_they_are(grads_and_vars: Any) -> list[Any]:
    return list(grads_and_vars)
