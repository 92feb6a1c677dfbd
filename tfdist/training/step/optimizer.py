"""Builds a Keras optimizer, and applies one step's gradients, which are summed over the replicas before it sees them.

Invariant: what an optimizer's settings mean does not depend on the number of replicas; the weights are those of the
optimizer's own `apply` on one device. Keras decides inside of `apply`, in a replica context, whether a step is one of
those at which moving averages overwrite the weights; there no collective and no cross-replica update is allowed.
`Update` decides the same outside. Keras's private names for averages are used here alone; tests/training/test_as_fit.py
compares with `fit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UserError, suggest
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.groups import GROUPS
from tfdist.recipes.lengths import RunLength, parse_length
from tfdist.recipes.schedules import bind
from tfdist.settings.checks import FUNCTION, format_value
from tfdist.strategies.strategy import Strategy
from tfdist.training.step.precision import LossScale, can_lower

Gradients = Sequence[tf.Tensor | tf.IndexedSlices]
REDUCTION = "_all_reduce_sum_gradients"
NUM_RATES = 72  # of a run, which are looked at


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
                f"write train.num_microbatches = {steps}. In tfdist.fit these are batch_size and num_microbatches."
            )
    if build is None:
        optimizer.build(model.trainable_variables)
    else:
        build(optimizer, model.trainable_variables, patches)
    for one in parts(optimizer):
        disable_reduction(one, patches)
    return optimizer


def _optimizer_names() -> set[str]:
    """The optimizers that `keras.optimizers.get` makes of a name alone."""
    found = {name: one for name, one in vars(keras.optimizers).items() if isinstance(one, type)}
    bases = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    return {n.lower() for n, one in found.items() if issubclass(one, bases[0]) and one not in bases}


def parts(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that update variables: those inside a MultiOptimizer, or the optimizer itself."""
    return list(optimizer.optimizers) if isinstance(optimizer, keras.optimizers.MultiOptimizer) else [optimizer]


def list_optimizers(owner: Any) -> list[keras.optimizers.Optimizer]:
    """The optimizers that a model or an optimizer has as attributes, in lists and dicts too, and those inside them."""
    values: list[Any] = []
    for each in vars(owner).values():
        values += each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else [each]
    inner = [value for value in values if isinstance(value, keras.optimizers.Optimizer) and value is not owner]
    return list({id(each): each for one in inner for each in (one, *list_optimizers(one))}.values())


def learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """The rate of the next update; of a MultiOptimizer, that of its first optimizer."""
    return float(keras.ops.convert_to_numpy(parts(optimizer)[0].learning_rate))


def sample_rates(optimizer: keras.optimizers.Optimizer, total_steps: int) -> list[tuple[int, float]]:
    """Samples steps of a run with their learning rates; the first step alone where the rate stays."""
    schedule = optimizer._learning_rate
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return [(0, learning_rate(optimizer))]
    steps = [round(i * (total_steps - 1) / (NUM_RATES - 1)) for i in range(NUM_RATES)]
    return [(step, float(schedule(np.int64(step)))) for step in steps]


def constant_rates(optimizer: keras.optimizers.Optimizer) -> list[float | None]:
    """The learning rates of `parts` that are a number; None for a schedule."""
    rates = [one.learning_rate for one in parts(optimizer)]
    return [float(keras.ops.convert_to_numpy(r)) if isinstance(r, keras.Variable) else None for r in rates]


def bind_schedules(
    optimizer: keras.optimizers.Optimizer, run: RunLength, variables: Sequence[keras.Variable], patches: Patches
) -> None:
    """Tells the optimizer's schedules and groups how long the run is, and what is trained, where they want to know.

    Raises:
      UserError: one does not fit into the run.
    """
    for one in parts(optimizer):
        bind(one._learning_rate, run)
        groups = getattr(one, GROUPS, None)
        if groups is not None:
            groups.bind(one, run, variables, patches)


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
    return parse_length("train.swa_start", start).steps(run)


def keeps_average(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a moving average takes the weights' place at the end."""
    return any(one.use_ema for one in parts(optimizer))


def disable_reduction(optimizer: keras.optimizers.Optimizer, patches: Patches) -> None:
    """Keeps the optimizer from summing over the replicas once more what is summed already.

    The method belongs to Keras's TensorFlow optimizer and is private; tests/equivalence/test_equivalence.py fails when
    a release of Keras changes it.
    """
    patches.replace(optimizer, **{REDUCTION: list})


class Update:
    """The update of variables by a step's gradients; called outside of any replica context.

    Args:
      strategy: connected.
      optimizer: from `build_optimizer`.
      loss_scale: learns of each update.
      rate_factor: of the learning rate that the optimizer has.
      jit_compile: whether XLA compiles what one replica does at each step. Without effect where a process has several,
        as Keras updates the variables of all of them at once.
      swa_start: the step from which on averages are plain means (Izmailov et al., "Averaging weights leads to wider
        optima and better generalization", 2018); None leaves them exponential.

    Attributes:
      takes_repeats: whether a gradient may have several rows of one index; Keras's optimizers add up nothing.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: keras.optimizers.Optimizer,
        *,
        loss_scale: LossScale | None = None,
        rate_factor: float = 1.0,
        jit_compile: bool = False,
        swa_start: int | None = None,
    ) -> None:
        self._strategy = strategy
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._rate_factor = rate_factor
        self._swa_start = swa_start
        self.takes_repeats = jit_compile and strategy.topology.num_local_replicas == 1
        self._run = self._run_compiled if self.takes_repeats else strategy.run
        self._run_everywhere = strategy.run

    def __call__(self, gradients: Gradients, variables: Sequence[keras.Variable]) -> tf.Tensor:
        """Updates `variables`, of which each has a gradient; True, as a branch of `tf.cond` gives something."""
        for optimizer, indices in self._group_by_optimizer(variables):
            own = [variables[i] for i in indices]
            done = tf.convert_to_tensor(self._strategy.first_local(optimizer.iterations.value))

            apply = functools.partial(optimizer.apply, trainable_variables=own)
            if type(optimizer).apply_gradients is not keras.optimizers.Optimizer.apply_gradients:  # which fit calls
                apply = functools.partial(_apply_gradients, optimizer, own)
            if not own:  # a worker that owns none counts as the others do
                apply = functools.partial(lambda one, _: one.iterations.assign_add(1), optimizer)
            with Patches() as patches:  # while it is traced; not for the threads of single replicas
                if (rate := _rate_of(optimizer, done, self._rate_factor)) is not None:
                    patches.replace(optimizer, _learning_rate=lambda rate=rate: rate)
                if self._swa_start is not None:
                    patches.replace(optimizer, ema_momentum=_momentum_of_mean(done, self._swa_start))
                patches.replace(optimizer, ema_overwrite_frequency=None)
                self._run(apply, args=([gradients[i] for i in indices],))
            if optimizer.use_ema and optimizer.ema_overwrite_frequency:
                is_time = tf.equal((done + 1) % optimizer.ema_overwrite_frequency, 0)
                tf.cond(is_time, functools.partial(self._overwrite, optimizer), lambda: tf.constant(True))
        if isinstance(self._optimizer, keras.optimizers.MultiOptimizer):
            self._run_everywhere(lambda: self._optimizer.iterations.assign_add(1))
        if self._loss_scale is not None:
            self._strategy.run(self._loss_scale.update, args=(tf.constant(True),))
        return tf.constant(True)

    def _overwrite(self, optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
        """Puts the averages in the place of the weights."""

        def on_replica() -> None:
            averages = optimizer._model_variables_moving_average
            for variable, average in zip(optimizer._trainable_variables, averages, strict=True):
                if average is None:  # of a variable that is overwritten with its gradient
                    continue
                variable.value.assign(tf.convert_to_tensor(average.value))
                if variable.constraint is not None:
                    variable.assign(variable.constraint(variable))

        self._run_everywhere(on_replica)
        return tf.constant(True)

    def _group_by_optimizer(
        self, variables: Sequence[keras.Variable]
    ) -> list[tuple[keras.optimizers.Optimizer, list[int]]]:
        """The optimizers, and the indices in `variables` of those that each updates."""
        optimizer = self._optimizer
        if not isinstance(optimizer, keras.optimizers.MultiOptimizer):
            return [(optimizer, list(range(len(variables))))]
        owners = {id(v): index for index, each in enumerate(optimizer.optimizers) for v in each._trainable_variables}
        indices: dict[int, list[int]] = {}
        for i, variable in enumerate(variables):
            indices.setdefault(owners[id(variable)], []).append(i)
        return [(optimizer.optimizers[index], some) for index, some in sorted(indices.items())]

    def _run_compiled(self, function: Callable[[Gradients], None], args: tuple[Gradients]) -> None:
        """Runs it for the only replica of this process, outside of its context, where nothing can be merged.

        Rows of an embedding's gradient become all of it, as Keras moves every row. XLA makes it so quicker than
        TensorFlow, but compiles anew for each number of rows.
        """
        given = [g if _rows_are_known(g) else tf.convert_to_tensor(g) for g in args[0]]

        def update(own: Gradients) -> None:
            function([tf.convert_to_tensor(gradient) for gradient in own])

        tf.function(update, jit_compile=True, autograph=False)(given)

    def compiles(self, variables: Sequence[keras.Variable]) -> bool:
        """Whether XLA has all that an update of `variables` needs; nothing is run."""
        gradients = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        return can_lower(lambda *own: self(own, variables), gradients)


def _apply_gradients(optimizer: Any, variables: Sequence[keras.Variable], gradients: Gradients) -> None:
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def _rows_are_known(gradient: tf.Tensor | tf.IndexedSlices) -> bool:
    return isinstance(gradient, tf.IndexedSlices) and gradient.values.shape.is_fully_defined()


def _rate_of(optimizer: keras.optimizers.Optimizer, step: tf.Tensor, factor: float) -> tf.Tensor | None:
    """The rate of this step, which Keras else traces again for each variable that decays; None: as it is."""
    given = optimizer._learning_rate
    if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        rate = given(step)
    elif factor == 1.0:
        return None
    else:
        rate = tf.convert_to_tensor(optimizer.learning_rate)
    return rate * factor if factor != 1.0 else rate


def _momentum_of_mean(step: tf.Tensor, start: int) -> tf.Tensor:
    """The momentum by which an average is the mean of all weights since `start`."""
    averaged = tf.maximum(tf.cast(step, tf.float32) - start, 0.0)
    return averaged / (averaged + 1.0)
