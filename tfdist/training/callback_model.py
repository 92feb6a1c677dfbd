"""The model as callbacks find it: compiled, and computing on this process alone.

Invariant: afterwards the model is compiled, or not, with the same objects as before. The private names of Keras that
say how a model is compiled are used here and in compiled.py; tests/keras_fit/test_fit.py fails when they change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from tfdist.tasks.base import Task

COMPILED = (
    *("compiled", "optimizer", "loss", "_compile_loss", "_compile_metrics", "_compile_config", "_loss_tracker"),
    *("_compiled_trainable_state", "_run_eagerly", "_jit_compile", "steps_per_execution"),
)
FUNCTIONS = ("train_function", "test_function", "predict_function")


@contextlib.contextmanager
def compiled_as(model: keras.Model, optimizer: keras.optimizers.Optimizer, task: Task) -> Iterator[None]:
    """Compiled with what a training uses, so that a callback's `self.model` has what `fit` gives it.

    Its `loss`, `metrics`, `evaluate` and `predict` are there. The metrics are made for this, and hold nothing of the
    training. What a callback computes is computed by every process that the callback runs in, on all that it is given.
    """
    arguments = task.compile_arguments()
    with as_it_was(model):
        if arguments is None:
            model.optimizer = optimizer  # where callbacks look for the learning rate
        else:
            given = model.loss
            model.compile(optimizer, auto_scale_loss=False, jit_compile=False, **arguments)
            model.loss = model.loss if given is None else given  # as a user who compiled it wrote it
            _build_metrics(model)
        strategy, model._distribute_strategy = model._distribute_strategy, None
        try:
            yield
        finally:
            model._distribute_strategy = strategy


def _build_metrics(model: keras.Model) -> None:
    """Lets `model.metrics` list them, as in `fit`, where a callback asks which way a metric is better."""
    metrics = model._compile_metrics
    if metrics is not None:
        names = metrics.output_names or []
        like_outputs = dict.fromkeys(names, 0.0) if len(names) > 1 else 0.0
        metrics.build(like_outputs, like_outputs)


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
