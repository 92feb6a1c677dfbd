"""The model as callbacks find it: compiled, and computing on this process alone.

Invariant: afterwards the model is compiled, or not, with the same objects as before. The private names of Keras that
say how a model is compiled are used here and in compiled.py; tests/keras_fit/test_fit.py fails when they change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tfdist.tasks.base import Task
from tfdist.training.learner import Learner

COMPILED = (
    *("compiled", "optimizer", "loss", "_compile_loss", "_compile_metrics", "_compile_config", "_loss_tracker"),
    *("_compiled_trainable_state", "_run_eagerly", "_jit_compile", "steps_per_execution"),
)
FUNCTIONS = ("train_function", "test_function", "predict_function")


@contextlib.contextmanager
def compiled_as(learner: Learner, task: Task) -> Iterator[None]:
    """Compiled with what a training uses, so that a callback's `self.model` has what `fit` gives it.

    Its `loss`, `metrics`, `evaluate` and `predict` are there. The metrics are made for this, and hold nothing of the
    training. What a callback computes is computed by every process that the callback runs in, on all that it is given.
    A task of the user's own, and a subclassed model of several outputs, have the optimizer only.
    """
    model, optimizer = learner.model, learner.optimizer
    metrics = [spec.build() for spec in task.metric_specs()]
    for metric, trained in zip(metrics, learner.train_metrics.metrics, strict=True):
        metric.name = trained.name  # Keras numbers those of one class
    arguments = task.compile_arguments(metrics)
    with as_it_was(model):
        if arguments is None or (isinstance(arguments["loss"], Mapping) and _outputs(model) is None):
            model.optimizer = optimizer  # where callbacks look for the learning rate
        else:
            given = model.loss
            model.compile(optimizer, auto_scale_loss=False, jit_compile=False, **arguments)
            model.loss = model.loss if given is None else given  # as a user who compiled it wrote it
            outputs = _outputs(model)
            like_outputs = 0.0 if outputs is None else keras.tree.map_structure(lambda _: 0.0, outputs)
            model._compile_metrics.build(like_outputs, like_outputs)  # for `model.metrics` to list them, as in `fit`
        strategy, model._distribute_strategy = model._distribute_strategy, None
        try:
            yield
        finally:
            model._distribute_strategy = strategy


def _outputs(model: keras.Model) -> Any:
    """Symbolic outputs; None of a subclassed model, which has none until it is called."""
    try:
        return model.output
    except (AttributeError, ValueError):
        return None


@contextlib.contextmanager
def as_it_was(model: keras.Model) -> Iterator[None]:
    """Whatever is compiled meanwhile, the model ends as it began."""
    before = {name: vars(model)[name] for name in COMPILED if name in vars(model)}
    try:
        yield
    finally:
        for name in COMPILED:
            if name in before:
                object.__setattr__(model, name, before[name])  # Keras's own would track metrics once more
            else:
                vars(model).pop(name, None)
        for name in FUNCTIONS:
            setattr(model, name, None)  # they have the other metrics in their graphs
