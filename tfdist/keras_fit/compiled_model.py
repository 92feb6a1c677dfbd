"""A compiled model on its way through a training that takes its parts: what is asked of it before, what it is after.

Invariant: afterwards the model is compiled with the same objects as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from tfdist.errors import UserError
from tfdist.training.loop.callback_model import as_it_was
from tfdist.training.step.optimizer import with_reduction

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
def given_back(model: keras.Model) -> Iterator[None]:
    """Compiled as before once this ends; the global dtype policy too, which a training sets."""
    policy, optimizer = keras.config.dtype_policy(), model.optimizer
    try:
        with as_it_was(model):
            yield
    finally:
        with_reduction(getattr(optimizer, "inner_optimizer", optimizer))
        keras.config.set_dtype_policy(policy)
