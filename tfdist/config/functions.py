"""What can be known of a function or class without calling it.

Invariant: Keras is looked at only when something else has imported it.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.settings.declaration import Settings

NO_DEFAULT = object()


@dataclass(frozen=True)
class Function:
    """The signature of a function or class that a configuration names.

    Attributes:
      name: how the written configuration names it.
      identity: its module and name in Python, the same however it was imported; a root's plain name.
      parameters: the default of every parameter that can be given by name, NO_DEFAULT where it has none.
      takes_any: there is a `**kwargs` whose names are not known.
      builds: what it makes when that must not be made before the strategy's scope ("an optimizer"), otherwise empty.
      units: of those of its parameters that declare one.
    """

    name: str
    identity: str
    parameters: Mapping[str, Any]
    takes_any: bool
    builds: str
    units: Mapping[str, str]


def describe(called: Callable[..., Any], *, name: str, identity: str) -> Function:
    """Reads the signature of a function or class.

    Args:
      identity: empty for the module and name that Python knows it by.
    """
    parameters, takes_any = _parameters(called)
    module = getattr(called, "__module__", None) or type(called).__module__
    return Function(
        name=name,
        identity=identity or f"{module}.{getattr(called, '__qualname__', name)}",
        parameters=parameters,
        takes_any=takes_any,
        builds=_name_product(called),
        units=_units(called),
    )


def _units(called: Callable[..., Any]) -> dict[str, str]:
    if not inspect.isclass(called) or not issubclass(called, Settings):
        return {}
    return {name: declared.unit for name, declared in called.declarations().items() if declared.unit}


def _parameters(called: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """The parameters that can be given by name with their defaults, and whether any other name is taken."""
    construct = _constructor(called) if inspect.isclass(called) else called
    if construct is None:
        return {}, False
    try:
        signature = list(inspect.signature(construct).parameters.values())
    except (TypeError, ValueError):  # some builtins tell nothing
        return {}, True
    if inspect.isclass(called):
        signature = signature[1:]
    named = [p for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    parameters = {p.name: NO_DEFAULT if p.default is p.empty else p.default for p in named}
    takes_any = any(p.kind == p.VAR_KEYWORD for p in signature)
    if takes_any and inspect.isclass(called) and _is_keras_optimizer(called):
        # Their **kwargs go to the base class, which refuses names that are not its own, but only when it is built.
        bases = [inspect.signature(vars(base)["__init__"]) for base in called.__mro__[:-1] if "__init__" in vars(base)]
        inherited = {p.name: p.default for base in bases for p in base.parameters.values() if p.default is not p.empty}
        return {**inherited, **parameters}, False
    return parameters, takes_any


def _constructor(cls: type) -> Callable[..., Any] | None:
    """The innermost `__init__` or `__new__`; None for object's, which take nothing."""
    for base in cls.__mro__[:-1]:
        for name in ("__init__", "__new__"):
            if name in vars(base):
                return getattr(base, name)
    return None


def _is_keras_optimizer(called: type) -> bool:
    keras = sys.modules.get("keras")
    if keras is None or not called.__module__.startswith("keras."):
        return False
    return issubclass(called, keras.optimizers.Optimizer)


def _name_product(called: Callable[..., Any]) -> str:
    """Names the Keras object with variables that a class is, or that a function is annotated to return."""
    keras = sys.modules.get("keras")
    if keras is None:
        return ""
    made: Any = called
    if not inspect.isclass(called):
        try:
            made = typing.get_type_hints(called).get("return")
        except Exception:  # annotations that cannot be evaluated tell nothing
            return ""
    kinds = {
        "an optimizer": keras.optimizers.Optimizer,
        "a metric": keras.metrics.Metric,
        "a model": keras.Model,
        "a layer": keras.Layer,
    }
    return next((kind for kind, cls in kinds.items() if inspect.isclass(made) and issubclass(made, cls)), "")
