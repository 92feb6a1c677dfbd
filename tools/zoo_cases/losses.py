"""A case for each loss of Keras, with outputs and targets of the kind that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfdist.tasks.supervised import Supervised
from zoo_cases.case import Case, build_dense, draw_normal, draw_one_hot, draw_uniform, draw_whole

losses = keras.losses
NO_CASE = {"Loss": "the base class"}


def unit_length(outputs: Any) -> Any:
    """What a loss of similarities expects: without it the loss and the weights grow to 1e5, and roundings with them."""
    return keras.ops.normalize(outputs, axis=-1)


# loss, activation of the outputs, their number, targets
KINDS: dict[str, tuple[Callable[[], Any], str | Callable[[Any], Any] | None, int, Callable[[], np.ndarray]]] = {
    "BinaryCrossentropy": (losses.BinaryCrossentropy, "sigmoid", 1, lambda: draw_whole(1, below=2)),
    "BinaryFocalCrossentropy": (losses.BinaryFocalCrossentropy, "sigmoid", 1, lambda: draw_whole(1, below=2)),
    "CategoricalCrossentropy": (losses.CategoricalCrossentropy, "softmax", 3, draw_one_hot),
    "CategoricalFocalCrossentropy": (losses.CategoricalFocalCrossentropy, "softmax", 3, draw_one_hot),
    "CategoricalGeneralizedCrossEntropy": (losses.CategoricalGeneralizedCrossEntropy, "softmax", 3, draw_whole),
    "CategoricalHinge": (losses.CategoricalHinge, None, 3, draw_one_hot),
    "Circle": (losses.Circle, unit_length, 3, draw_whole),
    "CosineSimilarity": (losses.CosineSimilarity, None, 3, lambda: draw_normal(3, seed=4)),
    "Dice": (losses.Dice, "sigmoid", 3, draw_one_hot),
    "Hinge": (losses.Hinge, "tanh", 1, lambda: draw_whole(1, below=2)),
    "Huber": (losses.Huber, None, 3, lambda: draw_normal(3, seed=4)),
    "KLDivergence": (losses.KLDivergence, "softmax", 3, draw_one_hot),
    "LogCosh": (losses.LogCosh, None, 3, lambda: draw_normal(3, seed=4)),
    "MeanAbsoluteError": (losses.MeanAbsoluteError, None, 3, lambda: draw_normal(3, seed=4)),
    "MeanAbsolutePercentageError": (losses.MeanAbsolutePercentageError, None, 3, lambda: 50 + draw_normal(3, seed=4)),
    "MeanSquaredError": (losses.MeanSquaredError, None, 3, lambda: draw_normal(3, seed=4)),
    "MeanSquaredLogarithmicError": (losses.MeanSquaredLogarithmicError, "softplus", 3, lambda: draw_uniform(3)),
    "Poisson": (losses.Poisson, "softplus", 3, lambda: draw_uniform(3)),
    "SparseCategoricalCrossentropy": (losses.SparseCategoricalCrossentropy, "softmax", 3, draw_whole),
    "SquaredHinge": (losses.SquaredHinge, "tanh", 1, lambda: draw_whole(1, below=2)),
    "Tversky": (losses.Tversky, "sigmoid", 3, draw_one_hot),
}


def cases() -> dict[str, Case]:
    """The cases by name."""
    found = {
        name: Case(
            covers=[name],
            model=lambda units=units, activation=activation: build_dense(units, activation),
            data=lambda targets=targets: (draw_normal(6), targets()),
            task=lambda loss=loss: Supervised(loss=loss()),
        )
        for name, (loss, activation, units, targets) in KINDS.items()
    }
    found["CTC"] = Case(
        covers=["CTC"],
        model=_sequence_model,
        data=lambda: (draw_normal(8, 4), 1 + draw_whole(3, below=4)),
        task=lambda: Supervised(loss=losses.CTC()),
    )
    return found


def _sequence_model() -> keras.Model:
    inputs = keras.Input((8, 4))
    return keras.Model(inputs, keras.layers.Dense(6)(keras.layers.Dense(5, activation="tanh")(inputs)))
