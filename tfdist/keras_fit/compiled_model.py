"""A compiled model on its way through a training that takes its parts: what is asked of it before, what it is after."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.strategies.base import Strategy
from tfdist.tasks.own_methods import overrides
from tfdist.user_code import where_defined

# Where models of several workers were made, which Keras does not know of them after a training.
_scopes: weakref.WeakKeyDictionary[keras.Model, tf.distribute.Strategy] = weakref.WeakKeyDictionary()
PRECISIONS = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


def check_compiled(model: keras.Model) -> None:
    """Raises UserError where there is no compiled model, or one that tfdist.fit would train in another way."""
    if (backend := keras.backend.backend()) != "tensorflow":
        raise UserError(f"Keras runs on {backend}. Set KERAS_BACKEND=tensorflow before Keras is imported.")
    if not isinstance(model, keras.Model) or not model.compiled:
        raise UserError(
            f"tfdist.fit takes a compiled keras.Model; received {type(model).__name__}. Call model.compile(…) before."
        )
    if overrides(model, "fit") and getattr(model, "preprocessor", model) is not None:  # None: KerasHub's is Keras's
        raise UserError(
            f"{type(model).__name__} has a fit of its own{where_defined(type(model).fit)}, which tfdist.fit would not "
            "call. Give x and y as that fit prepares them, to a model whose class has none; of a KerasHub model map "
            "model.preprocessor over the data, and write model.preprocessor = None."
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


def scope_of(model: keras.Model) -> tf.distribute.Strategy:
    """TensorFlow's strategy in whose scope the model was made."""
    return _scopes.get(model) or model.distribute_strategy


@contextlib.contextmanager
def given_back(model: keras.Model, strategy: Strategy) -> Iterator[None]:
    """Puts the global dtype policy, which a training sets, back at the end.

    With several workers `evaluate` and `predict`, which Keras cannot distribute over these, compute in this process
    alone from then on.
    """
    policy = keras.config.dtype_policy()
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)
        if strategy.topology.num_workers > 1:
            _scopes[model] = scope_of(model)
            model._distribute_strategy, model.train_function = None, _refuse_training


def build_compiled(model: keras.Model, structure: Any) -> None:
    """Builds the compiled loss and metrics for a batch of this structure, so that `model.metrics` lists all of them."""
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=structure)


def _refuse_training(iterator: object) -> NoReturn:
    raise UserError(
        "The model's own fit would train this worker's copy alone, apart from those of the other workers. Call "
        "tfdist.fit(model, …) again."
    )
