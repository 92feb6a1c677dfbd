"""What a training and a `tfdist.fit` leave on a user's objects: `python -m keras_patches.left_behind STRATEGY DIR`.

Prints the differences between what they have themselves before and afterwards.
"""

from __future__ import annotations

import json
import pathlib
import sys
import types
from typing import Any

import keras
import numpy as np
from equivalence.cases import STRATEGIES
from training.trainings import run

import tfdist
from tfdist.recipes.groups import Group, Grouped
from tfdist.strategies.base import Strategy

REPLACED = {  # attributes of Keras's objects that some room replaces
    *(
        "call",
        "next",
        "assign",
        "assign_add",
        "assign_sub",
        "inner_loop",
        "momentum",
        "_moments",
        "_losses",
        "_loss_ids",
    ),
    *("update_step", "finalize_variable_values", "add_variable_from_reference", "loss_scale_factor", "_learning_rate"),
    *("_apply_weight_decay", "_all_reduce_sum_gradients", "ema_momentum", "ema_overwrite_frequency", "global_seed"),
    *("scale_loss_for_distribution", "internal_operation_seed"),
}
OF_FIT = {"stop_training", "stop_evaluating", "history"}  # what `keras.Model.fit` leaves on a model, too
PLAIN = (types.FunctionType, types.MethodType, int, float, str, type(None))
Held = dict[str, dict[str, Any]]


def build_model() -> keras.Model:
    inputs = keras.Input((64,))
    block = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.2)], name="block")
    x = keras.layers.BatchNormalization(momentum=0.9)(block(inputs))
    x = keras.layers.LSTM(4)(keras.layers.Reshape((2, 4))(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def held(model: keras.Model, optimizer: Any) -> Held:
    """What each object has itself, by name; of values that are no plain ones the type alone."""
    layers = list(model._flatten_layers(include_self=False))
    objects = {"model": model, "optimizer": optimizer} | {f"layer {each.name}": each for each in layers}
    objects |= {f"variable {each.path}": each for each in model.variables}
    objects |= {f"seed of {la.name}": seed for la in layers for seed in getattr(la, "_seed_generators", ())}
    return {
        name: {key: value if isinstance(value, PLAIN) else type(value) for key, value in vars(each).items()}
        for name, each in objects.items()
    }


def differences(before: Held, after: Held) -> list[str]:
    found = []
    for name, own in before.items():
        for key in (own.keys() | after[name].keys()) - OF_FIT:
            is_function = any(isinstance(each.get(key), PLAIN[:2]) for each in (own, after[name]))
            is_same = own[key] == after[name][key] if key in own and key in after[name] else False
            if not is_same and (is_function or key in REPLACED or (key in own) != (key in after[name])):
                found.append(f"{name}: {key} was {own.get(key)}, is {after[name].get(key)}")
    return sorted(found)


def train(strategy: Strategy, directory: pathlib.Path) -> list[str]:
    made: list[Any] = []
    before: Held = {}

    def model() -> keras.Model:
        made.append(build_model())
        return made[0]

    def optimizer() -> keras.optimizers.Optimizer:
        build = Grouped(lambda: keras.optimizers.SGD(0.1, use_ema=True, loss_scale_factor=2.0), [Group("bias$")])
        made.append(build())
        made[1].build(made[0].trainable_variables)
        before.update(held(*made))
        return made[1]

    settings: dict[str, Any] = {"recompute": ["block"], "num_microbatches": 2, "epochs": 2, "swa_start": 1}
    callbacks = [keras.callbacks.Callback()]
    run(directory, strategy=strategy, model=model, optimizer=optimizer, callbacks=callbacks, **settings)
    return differences(before, held(*made))


def fit(strategy: Strategy) -> list[str]:
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.SGD(0.1, loss_scale_factor=2.0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, ["accuracy"])
        optimizer.build(model.trainable_variables)
    before = held(model, optimizer)
    x, y = np.ones((32, 64), np.float32), np.zeros(32)
    tfdist.fit(model, x, y, epochs=2, verbose=0, strategy=strategy, callbacks=[keras.callbacks.Callback()])
    return differences(before, held(model, optimizer))


def main(strategy_name: str, directory: str) -> None:
    strategy = STRATEGIES[strategy_name]()
    strategy.connect()
    print("LEFT", json.dumps(train(strategy, pathlib.Path(directory)) + fit(strategy)))


if __name__ == "__main__":
    main(*sys.argv[1:])
