"""All cases, and what of Keras's public classes they cover.

Invariant: a class that Keras makes public is covered by a case or has a reason why there is none; `uncovered` says
which is not. Classes are found by looking into Keras's modules, so a new one is missed by nobody.
"""

from __future__ import annotations

import inspect
from types import ModuleType

import keras

from zoo_cases import layers, losses, metrics, optimizers, quantized
from zoo_cases.case import Case

KINDS: dict[str, tuple[ModuleType, type, ModuleType]] = {
    "layers": (keras.layers, keras.layers.Layer, layers),
    "losses": (keras.losses, keras.losses.Loss, losses),
    "metrics": (keras.metrics, keras.metrics.Metric, metrics),
    "optimizers": (keras.optimizers, keras.optimizers.Optimizer, optimizers),
    "quantized layers": (quantized, keras.layers.Layer, quantized),  # no classes of their own
}


def list_classes(kind: str) -> dict[str, list[str]]:
    """Names of the public classes of a kind, each with the other names that it has there (Conv2D: Convolution2D)."""
    module, base, _ = KINDS[kind]
    by_class: dict[type, list[str]] = {}
    for name, value in inspect.getmembers(module, inspect.isclass):
        if issubclass(value, base):
            by_class.setdefault(value, []).append(name)
    found = {}
    for value, names in by_class.items():
        main = value.__name__ if value.__name__ in names else names[0]
        found[main] = [name for name in names if name != main]
    return dict(sorted(found.items()))


def cases(kind: str) -> dict[str, Case]:
    """The cases of a kind by key, `kind/name`."""
    return {f"{kind}/{name}": case for name, case in sorted(KINDS[kind][2].cases().items())}


def collect_cases() -> dict[str, Case]:
    """The cases of all kinds by key."""
    return {key: case for kind in KINDS for key, case in cases(kind).items()}


def find_uncovered() -> list[str]:
    """Public classes that no case covers and that no reason excuses, and names that Keras does not have (any more)."""
    found = []
    for kind in [kind for kind in KINDS if list_classes(kind)]:
        public = set(list_classes(kind))
        told = [name for case in cases(kind).values() for name in case.covers] + list(KINDS[kind][2].NO_CASE)
        found += [f"{kind}/{name}: no case" for name in sorted(public - set(told))]
        found += [f"{kind}/{name}: not in Keras" for name in sorted(set(told) - public)]
        found += [f"{kind}/{name}: told twice" for name in sorted({name for name in told if told.count(name) > 1})]
    return found


def match_cases(patterns: list[str]) -> list[str]:
    """Keys of the cases that cover one of the names (Dense, losses/Dice); all without names.

    Raises:
      KeyError: a name that no case covers.
    """
    every = collect_cases()
    if not patterns:
        return list(every)
    found: list[str] = []
    for pattern in patterns:
        kind, _, name = pattern.rpartition("/")
        hits = [key for key, case in every.items() if key == pattern or (key.startswith(kind) and name in case.covers)]
        if not hits:
            raise KeyError(pattern)
        found += [key for key in hits if key not in found]
    return found
