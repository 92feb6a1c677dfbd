"""Applies one step's gradients, whatever the optimizer is told to do with them.

Keras decides inside of `apply`, in a replica context, whether a step is one of those at which moving averages overwrite
the weights; there no collective and no cross-replica update is allowed. Here the same is decided outside, where it is.
Invariant: the weights are those of the optimizer's own `apply` on one device. Keras's private names for averages are
used here alone; tests/training/test_as_fit.py compares with `fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_patches.patches import Patches
from tfdist.strategies.base import Strategy

Gradients = Sequence[tf.Tensor | tf.IndexedSlices]


class Update:
    """What is done with the gradients of a step; called outside of any replica context.

    Args:
      strategy: connected.
      optimizer: from `build_optimizer`.
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
        rate_factor: float = 1.0,
        jit_compile: bool = False,
        swa_start: int | None = None,
    ) -> None:
        self._strategy = strategy
        self._optimizer = optimizer
        self._rate_factor = rate_factor
        self._swa_start = swa_start
        self.takes_repeats = jit_compile and strategy.topology.num_local_replicas == 1
        self._run = self._run_compiled if self.takes_repeats else strategy.run
        self._run_everywhere = strategy.run

    def __call__(self, gradients: Gradients, variables: Sequence[keras.Variable]) -> None:
        """Updates `variables`, of which each has a gradient."""
        for optimizer, places in self._by_optimizer(variables):
            own = [variables[i] for i in places]
            done = tf.convert_to_tensor(self._strategy.first_local(optimizer.iterations.value))

            def apply(some: Gradients, optimizer: Any = optimizer, own: Any = own) -> None:
                if own:
                    optimizer.apply(some, own)
                else:  # a worker that owns none counts as the others do
                    optimizer.iterations.assign_add(1)

            with Patches() as patches:  # while it is traced; not for the threads of single replicas
                if (rate := _rate_of(optimizer, done, self._rate_factor)) is not None:
                    patches.replace(optimizer, _learning_rate=lambda rate=rate: rate)
                if self._swa_start is not None:
                    patches.replace(optimizer, ema_momentum=_momentum_of_mean(done, self._swa_start))
                patches.replace(optimizer, ema_overwrite_frequency=None)
                self._run(apply, args=([gradients[i] for i in places],))
            if optimizer.use_ema and optimizer.ema_overwrite_frequency:

                def overwrite(optimizer: Any = optimizer) -> tf.Tensor:
                    self._run_everywhere(lambda: _overwrite(optimizer))
                    return tf.constant(True)

                is_time = tf.equal((done + 1) % optimizer.ema_overwrite_frequency, 0)
                tf.cond(is_time, overwrite, lambda: tf.constant(True))
        if isinstance(self._optimizer, keras.optimizers.MultiOptimizer):
            self._run_everywhere(lambda: self._optimizer.iterations.assign_add(1))

    def _by_optimizer(self, variables: Sequence[keras.Variable]) -> list[tuple[keras.optimizers.Optimizer, list[int]]]:
        """The optimizers, and the places in `variables` of those that each updates."""
        optimizer = self._optimizer
        if not isinstance(optimizer, keras.optimizers.MultiOptimizer):
            return [(optimizer, list(range(len(variables))))]
        owners = {id(v): index for index, each in enumerate(optimizer.optimizers) for v in each._trainable_variables}
        places: dict[int, list[int]] = {}
        for i, variable in enumerate(variables):
            places.setdefault(owners[id(variable)], []).append(i)
        return [(optimizer.optimizers[index], some) for index, some in sorted(places.items())]

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
        update = tf.function(lambda *own: self(own, variables), jit_compile=True, autograph=False)
        try:
            update.experimental_get_compiler_ir(*gradients)(stage="hlo")
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, ValueError, TypeError):
            return False
        return True


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


def _overwrite(optimizer: keras.optimizers.Optimizer) -> None:
    for variable, average in _averaged(optimizer):
        variable.value.assign(tf.convert_to_tensor(average.value))
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def _averaged(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """The variables and their moving averages; a variable that is overwritten with its gradient has none."""
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    return [(variable, average) for variable, average in pairs if average is not None]
