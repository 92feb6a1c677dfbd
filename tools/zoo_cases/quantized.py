"""Cases for Keras's quantized layers: in float8, which trains them, and in int8 and int4 beside layers that train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from zoo_cases.case import NUM_CLASSES, Case, draw_normal, draw_whole

layers = keras.layers
NO_CASE: dict[str, str] = {}
ON_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "Dense": lambda x: layers.Dense(5)(x),
    "EinsumDense": lambda x: layers.EinsumDense("abc,cd->abd", (6, 5), bias_axes="d")(x),
    "MultiHeadAttention": lambda x: layers.MultiHeadAttention(2, 4)(x, x),
}


def cases() -> dict[str, Case]:
    """The cases by name, such as "Dense in float8"."""
    found = {
        f"{name} in {mode}": Case(
            covers=[f"{name} in {mode}"],
            model=lambda mode=mode, body=body: _build_sequence_model(mode, body),
            data=lambda: (draw_normal(6, 4), draw_whole()),
        )
        for name, body in ON_SEQUENCES.items()
        for mode in ("float8", "int8", "int4")
    }
    for name in ("Embedding", "ReversibleEmbedding"):
        for mode in ("int8", "int4"):
            found[f"{name} in {mode}"] = Case(
                covers=[f"{name} in {mode}"],
                model=lambda name=name, mode=mode: _build_embedding_model(mode, getattr(layers, name)(9, 6)),
                data=lambda: (draw_whole(4, below=9), draw_whole()),
            )
    return found


def _build_sequence_model(mode: str, body: Callable[[Any], Any]) -> keras.Model:
    inputs = keras.Input((6, 4))
    before = layers.Dense(4, activation="tanh")(inputs)
    after = body(before)
    model = keras.Model(inputs, layers.Dense(NUM_CLASSES)(layers.Flatten()(after)))
    keras.Model(before, after).quantize(mode)  # these layers alone
    return model


def _build_embedding_model(mode: str, embedding: keras.layers.Layer) -> keras.Model:
    inputs = keras.Input((4,), dtype="int32")
    model = keras.Model(inputs, layers.Dense(NUM_CLASSES)(layers.Flatten()(embedding(inputs))))
    embedding.quantize(mode)
    return model
