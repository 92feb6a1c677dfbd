"""Methods of a subclassed model's own that Keras's trainer calls.

Invariant: a method that a model overrides is called, see training/step/own_step.py, or refused beside a task.
"""

from __future__ import annotations

from typing import Any, NoReturn

import keras

from tfdist.errors import UserError
from tfdist.tasks.task import Task
from tfdist.user_code import where_defined

STEPS = ("train_step", "test_step", "compute_loss", "compute_metrics")


def overrides(model: keras.Model, method: str) -> bool:
    """True where the model's class has another `method` than Keras's."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def refuse_own_steps(model: keras.Model) -> None:
    """Raises UserError where a task is to train a model that says by itself how it is trained."""
    for method in STEPS:
        if overrides(model, method):
            where = where_defined(getattr(type(model), method))
            raise UserError(
                f"{type(model).__name__} has a {method} of its own{where}, which train.task would not call. Leave "
                "train.task and train.optimizer out, and compile the model. Or take the method out."
            )


class OwnSteps(Task):
    """Placeholder task of a model that trains by its own steps, or without a loss; its `terms` fails."""

    def inputs(self, examples: Any) -> Any:
        """x of (x, y, sample_weight)."""
        return keras.utils.unpack_x_y_sample_weight(examples)[0]

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> NoReturn:
        raise AssertionError("The model's own steps compute its losses.")
