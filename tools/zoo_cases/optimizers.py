"""A case for each optimizer of Keras, on a model with a matrix, a bias and an embedding."""

from __future__ import annotations

from collections.abc import Callable

import keras

from zoo_cases.case import NUM_CLASSES, Case, draw_whole

optimizers = keras.optimizers
NO_CASE = {
    "Optimizer": "the base class",
    "LossScaleOptimizer": "`train.precision = 'float16'` scales the loss, over all replicas",
}
BUILDERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "Adadelta": lambda: optimizers.Adadelta(0.1),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Adagrad": lambda: optimizers.Adagrad(0.01),
    "Adam": lambda: optimizers.Adam(0.001, epsilon=1e-3),
    "AdamW": lambda: optimizers.AdamW(0.001, epsilon=1e-3),
    "Adamax": lambda: optimizers.Adamax(0.001, epsilon=1e-3),
    "Ftrl": lambda: optimizers.Ftrl(0.01),
    "Lamb": lambda: optimizers.Lamb(0.001, epsilon=1e-3),
    "Lion": lambda: optimizers.Lion(0.0001),
    "MultiOptimizer": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.SGD(0.1), {".*dense.*": optimizers.Adam(0.001, epsilon=1e-3)})
    ),
    "Muon": lambda: optimizers.Muon(0.001),
    "Nadam": lambda: optimizers.Nadam(0.001, epsilon=1e-3),
    "RMSprop": lambda: optimizers.RMSprop(0.001, epsilon=1e-3),
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.001, epsilon=1e-3),
}


def cases() -> dict[str, Case]:
    """The cases by name."""
    return {
        name: Case(covers=[name], model=_model, data=lambda: (draw_whole(4, below=9), draw_whole()), optimizer=builder)
        for name, builder in BUILDERS.items()
    }


def _model() -> keras.Model:
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(9, 5)(inputs))
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(keras.layers.Dense(6, activation="tanh")(x)))
