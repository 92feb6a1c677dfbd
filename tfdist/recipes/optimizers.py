"""Optimizers that Keras lacks."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable("tfdist")
class Lars(keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, 2017), for large batches.

    With weights w, gradient g and decay λ, of a variable each: u = g + λ·w, the rate is multiplied with
    η·‖w‖ ÷ (‖g‖ + λ·‖w‖), and momentum is that of the multiplied steps: v ← m·v + rate·u, w ← w − v. Variables of one
    dimension (biases, scales of normalization) are updated with momentum alone, without scaling and decay, as usual.

    Args:
      learning_rate: a rate or a schedule.
      momentum: m.
      trust_coefficient: η.
      decay: λ; `weight_decay` of Keras's optimizers is another, which does not go through the momentum.
      epsilon: added below the line.
      **options: of every Keras optimizer.
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        decay: float = 0.0,
        epsilon: float = 1e-9,
        name: str = "lars",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name, **options)
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient
        self.decay = decay
        self.epsilon = epsilon

    def build(self, variables: Any) -> None:
        """Makes a momentum for each variable."""
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Any, variable: keras.Variable, learning_rate: Any) -> None:
        """Moves one variable by its scaled step."""
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(ops.convert_to_tensor(gradient), variable.dtype)
        moved = self._momentums[self._get_variable_index(variable)]
        step = gradient
        if len(variable.shape) > 1:
            size, slope = ops.norm(ops.reshape(variable, [-1])), ops.norm(ops.reshape(gradient, [-1]))
            trust = self.trust_coefficient * size / (slope + self.decay * size + self.epsilon)
            rate = rate * ops.where(ops.logical_and(size > 0, slope > 0), trust, 1.0)
            step = gradient + self.decay * variable
        self.assign(moved, moved * ops.cast(self.momentum, variable.dtype) + rate * step)
        self.assign_sub(variable, moved)

    def get_config(self) -> dict[str, Any]:
        own = ("momentum", "trust_coefficient", "decay", "epsilon")
        return super().get_config() | {name: getattr(self, name) for name in own}
