"""Batch normalisation that means the same on every number of replicas.

A replica's own statistics are those of a smaller batch, so the number of replicas would change the training. With
statistics over the global batch it does not; the price is a few small reductions in each such layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras


def batch_norm_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The model's batch normalisation layers, at any depth."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


@contextlib.contextmanager
def synchronized(model: keras.Model, *, wanted: bool) -> Iterator[int]:
    """While it lasts, every batch normalisation layer computes its statistics over all replicas.

    Yields how many layers that changed. Afterwards the layers are as the user made them, so that what is exported does
    not depend on the strategy.
    """
    changed = [layer for layer in batch_norm_layers(model) if wanted and not layer.synchronized]
    for layer in changed:
        layer.synchronized = True
    try:
        yield len(changed)
    finally:
        for layer in changed:
            layer.synchronized = False
