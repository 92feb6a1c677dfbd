"""Makes a Keras optimizer safe for gradients that are summed over the replicas before it sees them.

Invariant: what an optimizer's settings mean does not depend on the number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.errors import UserError, suggest
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.groups import GROUPS
from tfdist.recipes.lengths import RunLength, length_of
from tfdist.recipes.schedules import bind
from tfdist.settings.checks import FUNCTION, format_value

REDUCTION = "_all_reduce_sum_gradients"


def check_optimizer_builder(builder: object) -> None:
    """Raises UserError where `builder` is no function or class that makes an optimizer, nor the name of one."""
    if isinstance(builder, str):
        names = _optimizer_names()
        if builder.lower() not in names:
            raise UserError(
                f"train.optimizer is {builder!r}, and Keras has none of that name; write one of "
                f"{', '.join(sorted(names))}.{suggest(builder.lower(), names)}"
            )
        return
    if isinstance(builder, keras.optimizers.Optimizer):
        raise UserError(
            f"train.optimizer is a {type(builder).__name__} object; it must be made inside the strategy's scope. Write "
            f"@keras.optimizers.{type(builder).__name__} without parentheses."
        )
    if not FUNCTION.accepts(builder):
        raise UserError(
            f"train.optimizer is {format_value(builder)}; write @keras.optimizers.Adam, or another, without "
            "parentheses, or its name, 'adam'."
        )


def build_optimizer(
    builder: Callable[[], keras.optimizers.Optimizer] | str,
    model: keras.Model,
    patches: Patches,
    build: Callable[[keras.optimizers.Optimizer, Sequence[keras.Variable], Patches], None] | None = None,
) -> keras.optimizers.Optimizer:
    """The optimizer, with its slots for the model's variables. Call it inside the strategy's scope.

    Args:
      builder: makes the optimizer.
      model: built.
      patches: of the training.
      build: makes its slots; None has the optimizer do it.

    Keras clips in `apply`; since the gradients it gets are those of the whole global batch already, `clipnorm`,
    `global_clipnorm` and `clipvalue` mean the same for every number of replicas.

    Raises:
      UserError: it is no optimizer builder, or does what the step does itself.
    """
    check_optimizer_builder(builder)
    optimizer = keras.optimizers.get(builder) if isinstance(builder, str) else builder()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UserError(
            f"train.optimizer gave a {type(optimizer).__name__}; it must give a keras.optimizers.Optimizer."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UserError(
            "train.optimizer gave a LossScaleOptimizer. Give the optimizer inside of it: train.precision = 'float16' "
            "scales by itself; elsewhere write its loss_scale_factor."
        )
    for one in parts(optimizer):
        steps = one.gradient_accumulation_steps
        if steps:
            raise UserError(
                f"{type(one).__name__}.gradient_accumulation_steps is {steps!r}; a step updates once. For the mean of "
                f"{steps} batches in the memory of one, leave it out, multiply train.global_batch_size by {steps}, and "
                f"write train.num_microbatches = {steps}; in tfdist.fit these are batch_size and num_microbatches."
            )
    if build is None:
        optimizer.build(model.trainable_variables)
    else:
        build(optimizer, model.trainable_variables, patches)
    for one in parts(optimizer):
        disable_reduction(one, patches)
    return optimizer


def _optimizer_names() -> set[str]:
    """Those that `keras.optimizers.get` makes of a name alone."""
    found = {name: one for name, one in vars(keras.optimizers).items() if isinstance(one, type)}
    bases = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    return {n.lower() for n, one in found.items() if issubclass(one, bases[0]) and one not in bases}


def parts(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that update variables: those inside a MultiOptimizer, or the optimizer itself."""
    return list(optimizer.optimizers) if isinstance(optimizer, keras.optimizers.MultiOptimizer) else [optimizer]


def learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """The rate of the next update; of a MultiOptimizer, that of its first optimizer."""
    return float(keras.ops.convert_to_numpy(parts(optimizer)[0].learning_rate))


def constant_rates(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.optimizers.Optimizer, float]]:
    """The optimizers whose learning rate is a number and no schedule, each with that number."""
    return [
        (one, float(keras.ops.convert_to_numpy(one.learning_rate)))
        for one in parts(optimizer)
        if isinstance(one.learning_rate, keras.Variable)
    ]


def bind_schedules(
    optimizer: keras.optimizers.Optimizer, run: RunLength, variables: Sequence[keras.Variable], patches: Patches
) -> None:
    """Tells the optimizer's schedules and groups how long the run is, and what is trained, where they want to know.

    Raises:
      UserError: one does not fit into the run.
    """
    for one in parts(optimizer):
        bind(one._learning_rate, run)
        placed = getattr(one, GROUPS, None)
        if placed is not None:
            placed.bind(run, variables, patches)


def steps_before_swa(optimizer: keras.optimizers.Optimizer, start: str | int | None, run: RunLength) -> int | None:
    """The steps before `train.swa_start`; None without it.

    Raises:
      UserError: the optimizer keeps no average.
    """
    if start is None:
        return None
    if not keeps_average(optimizer):
        raise UserError(
            f"train.swa_start is {start!r}, and {type(optimizer).__name__} keeps no average of the weights. Write "
            f"keras.optimizers.{type(optimizer).__name__}.use_ema = True, or leave train.swa_start out."
        )
    return length_of("train.swa_start", start).steps(run)


def keeps_average(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a moving average takes the weights' place at the end."""
    return any(one.use_ema for one in parts(optimizer))


def disable_reduction(optimizer: keras.optimizers.Optimizer, patches: Patches) -> None:
    """Keeps the optimizer from summing over the replicas once more what is summed already.

    The method belongs to Keras's TensorFlow optimizer and is private; tests/training/test_optimizer.py fails when a
    release of Keras changes it.
    """
    if not callable(getattr(optimizer, REDUCTION, None)):
        raise RuntimeError(
            f"keras {keras.__version__} has no Optimizer.{REDUCTION}: gradients would be summed twice. tfdist was "
            "written for the release that pyproject.toml names."
        )
    patches.replace(optimizer, **{REDUCTION: _as_they_are})


def _as_they_are(grads_and_vars: Any) -> list[Any]:
    return list(grads_and_vars)
