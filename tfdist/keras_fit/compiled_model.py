"""A compiled model on its way through a training that takes its parts: checks before it, identity, what it is after.

Invariant of the identity, by which a run directory knows model, optimizer, loss and examples: what stays the same has
the same words in another process, whatever names Keras gave its layers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import types
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
from tfdist.recipes.schedules import Schedule
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.task import overrides
from tfdist.telemetry.console.console import write_line
from tfdist.telemetry.json_text import to_json
from tfdist.training.run.compiled import find_loss_weights, uses_own_steps
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
    if not uses_own_steps(model) and model.optimizer and model.optimizer.built:
        known = {id(variable) for one in list_optimizers(model) for variable in one._trainable_variables}
        for variable in model.trainable_variables:
            if id(variable) not in known:
                raise UserError(
                    f"{variable.path} became trainable after the optimizer was built, which does not update it. Call "
                    "model.compile with a new optimizer."
                )


def warn_of_counting_schedules(model: keras.Model) -> None:
    """Warns where a schedule that counts the steps of a run would begin with those of an earlier call."""
    for optimizer in list_optimizers(model):
        schedule, done = optimizer._learning_rate, int(keras.ops.convert_to_numpy(optimizer.iterations))
        if done and isinstance(schedule, Schedule):
            write_line(
                sys.stderr,
                f"The optimizer has made {done:,} updates, and its {type(schedule).__name__} counts from the first of "
                "them. Give initial_epoch, or compile with a new optimizer for a schedule of this call.",
                "warning",
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


_UNWRITABLE = (NotImplementedError, TypeError, ValueError, AttributeError)  # of a get_config of the user's own
_NAMES = ("name", "dtype", "build_config", "registered_name")
# What callbacks leave of an optimizer that a second call of this process continues with, and what it was at first.
_began: weakref.WeakKeyDictionary[Any, tuple[str, str]] = weakref.WeakKeyDictionary()


def identity_of(model: keras.Model, sources: Mapping[str, Source]) -> dict[str, str]:
    """The settings of a call, by which `check_same_experiment` compares it; the contents of arrays alone count.

    Args:
      sources: of the examples, by what each is for.
    """
    optimizer = _text(model.optimizer)
    left, first = ("", "") if model.optimizer is None else _began.get(model.optimizer, ("", ""))
    found = {
        "fit.model": _digest(_layers(model)),
        "fit.optimizer": first if optimizer == left else optimizer,
        "fit.loss": _text(model.loss),
    }
    if (weights := find_loss_weights(model)) is not None:
        found["fit.loss_weights"] = _text(weights)
    for name, source in sources.items():
        if (held := source.arrays_in_memory()) is not None:
            found[f"fit.{name}"] = digest_arrays(keras.tree.flatten(held))
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
        return str(_plain(part))
    return f"{type(part).__name__}({', '.join(f'{name}={value!r}' for name, value in _config(part).items())})"


def _config(part: Any) -> dict[str, Any]:
    """Returns the config of a part of a model without names; and arguments that it leaves out, or knows by name."""
    try:
        config, is_whole = dict(part.get_config()), _is_of_library(type(part))
    except _UNWRITABLE:
        config, is_whole = {}, False
    for name in inspect.signature(type(part).__init__).parameters:
        for attribute in {name, f"_{name}"} & vars(part).keys():
            value = vars(part)[attribute]
            if hasattr(value, "__code__") or (name not in config and not is_whole):
                config[name] = value
    return dict(_plain(config))


def _digest(content: Any) -> str:
    return digest_arrays([np.frombuffer(to_json(content).encode(), np.uint8)])


def _is_of_library(definition: Any) -> bool:
    return str(definition.__module__).partition(".")[0] in ("keras", "tensorflow")


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
    """What the layers of a functional model are called on, by their places; of other models their own arguments."""
    try:
        config = model.get_config()
        entries = [each for each in config["layers"] if isinstance(each, Mapping) and "inbound_nodes" in each]
    except (*_UNWRITABLE, KeyError):
        return [_config(model)]
    places = {each["name"]: place for place, each in enumerate(entries)}
    nodes = [config.get("input_layers"), config.get("output_layers"), *(each["inbound_nodes"] for each in entries)]
    return [_plain(keras.tree.map_structure(lambda one: places.get(one, one) if isinstance(one, str) else one, nodes))]


def _plain(value: Any, within: tuple[Any, ...] = ()) -> Any:
    """A configuration without names and types, which a process counts, and functions with a digest of their code."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each, within) for name, each in value.items() if name not in _NAMES}
    if isinstance(value, list | tuple):
        return [_plain(each, within) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, functools.partial):
        return ["functools.partial", _plain([value.func, *value.args, value.keywords], within)]
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        return [type(value).__name__, _config(value)]
    if isinstance(value, keras.Operation | keras.Variable | tf.Variable):  # whose names and state are the process's
        return type(value).__name__
    if isinstance(value, np.ndarray):
        return digest_arrays([value])
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), value.co_names, _plain(value.co_consts, within)]
    if hasattr(value, "__code__") and not _is_of_library(value) and value.__code__ not in within:
        within = (*within, value.__code__)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        read = _plain([value.__code__, value.__defaults__, value.__kwdefaults__, cells], within)
        return f"{value.__name__} {_digest(read)[:8]}"
    if name := getattr(value, "__name__", ""):
        return name
    return value.item() if isinstance(value, np.generic) else re.sub(r" at 0x\w+", "", str(value))
