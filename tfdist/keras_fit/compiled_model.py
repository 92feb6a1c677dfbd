"""A compiled model on its way through a training that takes its parts: what is asked of it before, what it is after.

Invariant: afterwards the model is compiled with the same objects as before. The private names of Keras that say how a
model was compiled are used here and in training/compiled.py; tests/keras_fit/test_fit.py fails when they change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from tfdist.errors import UserError
from tfdist.training.optimizer import with_reduction

COMPILED = ("compiled", "optimizer", "loss", "_compile_loss", "_compile_metrics", "_compile_config", "_loss_tracker")
PRECISIONS = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


def check_compiled(model: keras.Model) -> None:
    """Raises UserError where there is no compiled model."""
    if not isinstance(model, keras.Model) or not model.compiled:
        raise UserError(
            f"tfdist.fit takes a compiled keras.Model; received {type(model).__name__}. Call model.compile(…) before."
        )
    if model.run_eagerly:
        raise UserError(
            "The model is compiled with run_eagerly=True, and tfdist.fit always compiles its steps. Leave that out, or "
            "look for the mistake with model.fit."
        )


def precision_of(model: keras.Model) -> str:
    """What `train.precision` is for a model whose layers exist already."""
    policies = {layer.dtype_policy.name for layer in model._flatten_layers()}
    return next((precision for policy, precision in PRECISIONS.items() if policy in policies), "float32")


@contextlib.contextmanager
def as_it_was(model: keras.Model) -> Iterator[None]:
    """Compiled as before once this ends; the global dtype policy too, which a training sets."""
    before = {name: vars(model)[name] for name in COMPILED if name in vars(model)}
    policy = keras.config.dtype_policy()
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(model, name, value)  # Keras's own would track metrics once more
        with_reduction(getattr(model.optimizer, "inner_optimizer", model.optimizer))
        keras.config.set_dtype_policy(policy)
