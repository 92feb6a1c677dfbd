"""Losses and metrics by the names that `keras.Model.compile` takes.

Invariant: a name means what it means to `compile`: 'accuracy' and 'crossentropy' are chosen by the shapes of targets
and outputs. `compile_utils`, where Keras does that, is private and used for this here alone;
tests/tasks/test_supervised.py fails when it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras.src.trainers import compile_utils

from tfdist.errors import UserError, suggest
from tfdist.tasks.task import symbolic_outputs

BY_SHAPES = ("crossentropy", "ce")
SHORT = ("accuracy", "acc", "crossentropy", "ce", "mse", "mae", "mape", "msle", "bce", "kld")


def call_symbolically(model: keras.Model, inputs: Any) -> Any:
    """A model's symbolic outputs for a nest of symbolic inputs, to whose last axes Keras may add one of length 1."""
    takes = getattr(model, "inputs", None) or []
    if any(len(own.shape) != len(given.shape) for own, given in zip(takes, keras.tree.flatten(inputs), strict=False)):
        return symbolic_outputs(model)
    return model(inputs)


def outputs_by_name(names: Sequence[str], outputs: Sequence[Any]) -> dict[str, Any]:
    """Several outputs by `Model.output_names`; Keras calls an output after its layer, which may be there twice.

    Raises:
      UserError: two have one name.
    """
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{names.count(name)} outputs of the model are called {name!r}, after the layer that gives them, and "
                "outputs are known by name. Wrap one of them: keras.layers.Identity(name='another_name')(…)."
            )
    return dict(zip(names, outputs, strict=True))


def find_loss(name: str, where: str) -> Any:
    """The loss, or the function, that Keras calls so; the name itself where it depends on shapes.

    Raises:
      UserError: there is none.
    """
    if name.lower() in BY_SHAPES:
        return name
    try:
        return keras.losses.get(name)
    except ValueError as error:
        known = _public(keras.losses)
        raise UserError(
            f"loss is {name!r} for {where}, and Keras has none of that name. Write one, such as "
            f"'sparse_categorical_crossentropy', or @keras.losses.…().{suggest(name, known)}"
        ) from error


def resolve_loss(given: Any, y_true: Any = None, y_pred: Any = None) -> keras.losses.Loss:
    """The loss of a name or of a function; one of `BY_SHAPES` chosen by symbolic targets and outputs."""
    return given if isinstance(given, keras.losses.Loss) else compile_utils.get_loss(given, y_true, y_pred)


def check_metric_name(name: str) -> None:
    """Raises UserError where Keras has no metric of this name. In the strategy's scope: Keras makes it to see."""
    if name.lower() in ("accuracy", "acc"):
        return
    try:
        keras.metrics.get(name)
    except ValueError as error:
        near = suggest(name, _public(keras.metrics))
        raise UserError(
            f"metrics holds {name!r}, and Keras has none of that name. Write one, such as 'accuracy', or "
            f"@keras.metrics.… without parentheses.{near}"
        ) from error
    except TypeError as error:
        raise UserError(f"The metric {name!r} cannot be built without arguments: {error}.") from error


def resolve_metric(given: Any, y_true: Any = None, y_pred: Any = None) -> keras.metrics.Metric:
    """A new metric of a name or a function, 'accuracy' chosen by symbolic targets and outputs."""
    return compile_utils.get_metric(given, y_true, y_pred)


def _public(module: Any) -> list[str]:
    return [*SHORT, *(name for name in vars(module) if not name.startswith("_"))]
