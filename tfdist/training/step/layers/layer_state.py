"""What layers keep of a forward pass: variables that it moves along, and losses that it adds.

Invariant: a step that is skipped leaves no trace in the first, and no replica sees another's of the second.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfdist.keras_patches.patches import Patches
from tfdist.training.step.randomness import seed_generators


def moving_variables(model: keras.Model) -> list[keras.Variable]:
    """What a forward pass may change: batch statistics, seeds, a layer's own counts; no frozen weights."""
    own = [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]
    found = [*own, *(generator.state for generator in seed_generators(model))]
    return list({id(v): v for v in found}.values())


def layer_losses(model: keras.Model) -> tuple[list[Any], list[Any]]:
    """What the last call of the model added to its loss: what depends on the examples, and what on the weights alone.

    `Model.losses` ends with one penalty for each trainable variable that has a regularizer.
    """
    losses = list(model.losses)
    num_penalties = sum(v.regularizer is not None for v in model.trainable_variables)
    return losses[: len(losses) - num_penalties], losses[len(losses) - num_penalties :]


def map_penalized(model: keras.Model) -> None:
    """Gives the penalties of weights, within a `keras.StatelessScope`, the weights, of which that knows none."""
    for variable in model.trainable_variables:
        if variable.regularizer is not None:
            variable.assign(variable.value)


def separate_losses(model: keras.Model, patches: Patches) -> None:
    """Keeps `add_loss` and activity regularizers of each replica apart.

    MirroredStrategy calls the same layers on a thread for each replica, and changes threads at every reduction, so in
    the middle of the pass where batch normalization is synchronized.
    """
    for layer in model._flatten_layers():
        patches.replace(layer, _losses=ThreadLosses(), _loss_ids=ThreadIds())


class ThreadLosses(threading.local):
    """As much of a list as Keras's layers use for their losses; every thread has its own."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def extend(self, losses: Iterable[Any]) -> None:
        self._held.extend(losses)

    def clear(self) -> None:
        self._held.clear()

    def __getitem__(self, index: Any) -> Any:
        return self._held[index]

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return list, ()  # a copy of the layer has a list again


class ThreadIds(ThreadLosses):
    """The same for the set of which losses are a layer's, where `keras.StatelessScope` holds them."""

    def add(self, identity: int) -> None:
        self._held.append(identity)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return set, ()
