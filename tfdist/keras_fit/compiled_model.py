"""A compiled model on its way through a training that takes its parts: checks before it, identity, what it is after.

Invariant of the identity, by which a run directory knows model, optimizer, loss and examples: what stays the same has
the same words in another process, whatever names Keras gave its layers.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.pipeline import digest_arrays
from tfdist.data.sources.source import Source
from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.task import overrides
from tfdist.telemetry.json_text import to_json
from tfdist.training.run.compiled import find_loss_weights
from tfdist.training.step.optimizer import list_optimizers
from tfdist.training.step.state import is_named_by_keras
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
    for method in ("make_train_function", "make_test_function"):
        if overrides(model, method):
            raise UserError(
                f"{type(model).__name__} has a {method} of its own{where_defined(getattr(type(model), method))}, which "
                "tfdist.fit would not call. Write what a batch does as a train_step and a test_step, or call model.fit."
            )
    if model.run_eagerly:
        raise UserError(
            "The model is compiled with run_eagerly=True, and tfdist.fit always compiles its steps. Leave that out, or "
            "look for the mistake with model.fit."
        )


def precision_of(model: keras.Model) -> str:
    """Returns `train.precision` of a model whose layers exist already."""
    policies = {layer.dtype_policy.name for layer in model._flatten_layers()}
    return next((precision for policy, precision in PRECISIONS.items() if policy in policies), "float32")


def scope_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """TensorFlow's strategy in whose scope the model was made; None where it was made in none."""
    return _scopes.get(model) or model._distribute_strategy


@contextlib.contextmanager
def restored_after_training(model: keras.Model, strategy: Strategy) -> Iterator[None]:
    """Puts the global dtype policy, which a training sets, back at the end, and a model that was made in no scope.

    With several workers `evaluate` and `predict`, which Keras cannot distribute over these, compute in this process
    alone from then on.
    """
    policy, scope = keras.config.dtype_policy(), scope_of(model)
    is_moved = scope is None and not isinstance(strategy, OneDevice)
    try:
        with _move_to_strategy(strategy, model) if is_moved else contextlib.nullcontext():
            yield
    finally:
        keras.config.set_dtype_policy(policy)
        if strategy.topology.num_workers > 1:
            if scope is not None:
                _scopes[model] = scope
            model._distribute_strategy, model.train_function = None, _refuse_training


@contextlib.contextmanager
def _move_to_strategy(strategy: Strategy, model: keras.Model) -> Iterator[None]:
    """Moves variables of model and optimizer to the strategy; at the end moves them back, with their new values.

    They stay the same objects of Keras, whose private `_value` is TensorFlow's variable.

    Raises:
      UserError: a layer holds a variable of TensorFlow's.
    """
    for layer in model._flatten_layers():
        if any(isinstance(each, tf.Variable) for each in vars(layer).values()):
            raise UserError(
                f"The layer {layer.name!r} holds a tf.Variable, which the strategy {strategy.name} cannot take over. "
                "Make it with add_weight, or the model in the scope: with tfdist.choose_strategy().scope():"
            )
    own = {id(variable): variable._value for variable in _variables(model)}
    optimizers = list_optimizers(model)
    with Patches() as patches:
        functions = dict.fromkeys(("train_function", "test_function", "predict_function"))  # they hold own variables
        patches.replace(model, _distribute_strategy=strategy.distribution, **functions)
        for optimizer in optimizers:
            patches.replace(optimizer, _distribution_strategy=strategy.distribution)
        is_done = False
        try:
            with strategy.scope():
                for variable in _variables(model):
                    variable._initialize(variable.numpy())
            _index_variables(optimizers)
            yield
            is_done = True
        finally:
            for variable in _variables(model):
                # What lies apart on each replica is added up by all workers, which may not all come here.
                is_readable = is_done or variable.synchronization != "on_read"
                value = variable.numpy() if is_readable else np.zeros(variable.shape, variable.dtype)
                variable._initialize(own.get(id(variable), value))
                if is_readable:
                    variable._value.assign(value)
            _index_variables(optimizers)


def _variables(model: keras.Model) -> list[keras.Variable]:
    """Variables of layers, optimizers and metrics, each once."""
    parts = [model, *list_optimizers(model), *model.metrics]
    return list({id(variable): variable for part in parts for variable in part.variables}.values())


def _index_variables(optimizers: Iterable[Any]) -> None:
    """Has Keras's optimizers find the places of variables that have changed beneath."""
    for optimizer in optimizers:
        if optimizer.built:
            trained = optimizer._trainable_variables
            optimizer._trainable_variables_indices = {optimizer._var_key(v): i for i, v in enumerate(trained)}


def build_compiled(model: keras.Model, structure: Any) -> None:
    """Builds the compiled loss and metrics for a batch of this structure, so that `model.metrics` lists all of them."""
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=structure)


def _refuse_training(iterator: object) -> NoReturn:
    raise UserError(
        "The model's own fit would train this worker's copy alone, apart from those of the other workers. Call "
        "tfdist.fit(model, …) again."
    )


_NAMES = ("name", "dtype", "build_config", "registered_name")
# What callbacks leave of an optimizer that a second call of this process continues with, and what it was at first.
_began: weakref.WeakKeyDictionary[Any, tuple[str, str]] = weakref.WeakKeyDictionary()


def identity_of(model: keras.Model, source: Source) -> dict[str, str]:
    """The settings of a call, by which `check_same_experiment` compares it; the contents of arrays alone count."""
    optimizer = _text(model.optimizer)
    left, first = ("", "") if model.optimizer is None else _began.get(model.optimizer, ("", ""))
    found = {
        "fit.model": digest_arrays([np.frombuffer(to_json(_layers(model)).encode(), np.uint8)]),
        "fit.optimizer": first if optimizer == left else optimizer,
        "fit.loss": _text(model.loss),
    }
    if (weights := find_loss_weights(model)) is not None:
        found["fit.loss_weights"] = _text(weights)
    if (held := source.arrays_in_memory()) is not None:
        found["fit.data"] = digest_arrays(keras.tree.flatten(held))
    return found


def remember_optimizer_config(model: keras.Model, identity: Mapping[str, str]) -> None:
    """Records the optimizer's config after a call, so that callbacks' changes make the next no other experiment."""
    if "fit.optimizer" in identity and model.optimizer is not None:
        _began[model.optimizer] = (_text(model.optimizer), identity["fit.optimizer"])


def _text(part: Any) -> str:
    """An optimizer, a loss, or a nest of losses, as somebody would write it."""
    if isinstance(part, Mapping):
        return "{" + ", ".join(f"{name!r}: {_text(each)}" for name, each in part.items()) + "}"
    if isinstance(part, list | tuple):
        return "[" + ", ".join(map(_text, part)) + "]"
    if not isinstance(part, keras.Optimizer | keras.Loss):
        return getattr(part, "__name__", None) or str(_plain(part))
    config = _config(part)
    return f"{type(part).__name__}({', '.join(f'{name}={value!r}' for name, value in config.items())})"


def _config(part: Any) -> dict[str, Any]:
    """Returns the config of a layer, loss or optimizer without names; empty if its get_config() fails."""
    try:
        return dict(_plain(part.get_config()))
    except (NotImplementedError, TypeError, ValueError):  # of the user's own
        return {}


def _layers(model: Any) -> list[Any]:
    """Classes, own names and settings of all layers, in their order, and how those of a functional model connect."""
    layers = [
        [
            type(layer).__name__,
            *([] if is_named_by_keras(layer) else [layer.name]),
            _layers(layer) if hasattr(layer, "layers") else _config(layer),
        ]
        for layer in model.layers
    ]
    return [*layers, _connections(model)]


def _connections(model: Any) -> list[Any]:
    """What the layers of a functional model are called on, by their places; of other models nothing."""
    try:
        config = model.get_config()
    except (NotImplementedError, TypeError, ValueError):  # of the user's own
        return []
    entries = [each for each in config.get("layers", ()) if isinstance(each, Mapping) and "inbound_nodes" in each]
    places = {each["name"]: place for place, each in enumerate(entries)}
    nodes = [config.get("input_layers"), config.get("output_layers"), *(each["inbound_nodes"] for each in entries)]
    return [_plain(keras.tree.map_structure(lambda one: places.get(one, one) if isinstance(one, str) else one, nodes))]


def _plain(config: Any) -> Any:
    """A configuration without names and types, which a process counts."""
    if isinstance(config, Mapping):
        return {str(name): _plain(value) for name, value in config.items() if name not in _NAMES}
    if isinstance(config, list | tuple):
        return [_plain(each) for each in config]
    if config is None or isinstance(config, bool | int | float | str):
        return config
    return config.item() if isinstance(config, np.generic) else re.sub(r" at 0x\w+", "", str(config))
