"""The model as callbacks find it: compiled, and computing on this process alone.

Invariant: it is so while a hook runs and no longer, so that nothing of it gets into what is traced for the training;
before and afterwards the model is compiled, or not, with its own objects. The private names of Keras that say how a
model is compiled are used here and in compiled.py; tests/keras_fit/test_fit.py fails when they change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tfdist.keras_patches.patches import Patches
from tfdist.tasks.base import Task, symbolic_outputs
from tfdist.training.step.state import Learner

COMPILED = (
    *("compiled", "optimizer", "loss", "_compile_loss", "_compile_metrics", "_compile_config", "_loss_tracker"),
    *("_compiled_trainable_state", "_run_eagerly", "_jit_compile", "steps_per_execution", "_distribute_strategy"),
    *("train_function", "test_function", "predict_function"),
)


class CallbackModel:
    """A model compiled with what a training uses, so that a callback's `self.model` has what `fit` gives it.

    Its `loss`, `metrics`, `evaluate` and `predict` are there. The metrics are made for this, and hold nothing of the
    training. What a callback computes is computed by every process that the callback runs in, on all that it is given.
    For a task of the user's own, and a subclassed model of several outputs, the optimizer alone is there.

    Args:
      learner: of the training.
      task: bound to its model.
    """

    def __init__(self, learner: Learner, task: Task) -> None:
        self._model = learner.model
        with Patches() as patches:
            patches.keep(self._model, *COMPILED)
            _compile(learner, task)
            self._compiled = _state(self._model)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While a hook runs."""
        with Patches() as patches:
            patches.keep(self._model, *COMPILED)
            patches.replace(self._model, **self._compiled)  # Keras's own setting would track metrics once more
            try:
                yield
            finally:
                self._compiled = _state(self._model)  # with the functions that `evaluate` has traced


def _state(model: keras.Model) -> dict[str, Any]:
    return {name: vars(model)[name] for name in COMPILED if name in vars(model)}


def _compile(learner: Learner, task: Task) -> None:
    model = learner.model
    metrics = [spec.build() for spec in task.metric_specs()]
    for metric, trained in zip(metrics, learner.train_metrics.metrics, strict=True):
        metric.name = trained.name  # Keras numbers those of one class
    arguments, outputs = task.compile_arguments(metrics), symbolic_outputs(model)
    if arguments is None or (isinstance(arguments["loss"], Mapping) and outputs is None):
        model.optimizer = learner.optimizer  # where callbacks look for the learning rate
    else:
        given = model.loss
        # Not the model's own, which may take other arguments.
        keras.Model.compile(model, learner.optimizer, auto_scale_loss=False, jit_compile=False, **arguments)
        model.loss = model.loss if given is None else given  # as a user who compiled it wrote it
        like_outputs = 0.0 if outputs is None else keras.tree.map_structure(lambda _: 0.0, outputs)
        model._compile_metrics.build(like_outputs, like_outputs)  # for `model.metrics` to list them, as in `fit`
    model._distribute_strategy = None
