"""What a training replaces on a user's objects is gone when it ends, and nothing else replaces anything."""

from __future__ import annotations

import ast
import json
import pathlib
import sys
import types
from typing import Any

import keras
import pytest
from equivalence.cases import STRATEGIES
from support import REPOSITORY, parse_package, run_python
from tensorflow.python.eager import context
from training.trainings import run

from tfdist.data.sources import user_dataset
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.groups import Group, Grouped
from tfdist.strategies.strategy import Strategy

ROOMS = ("training", "tasks", "recipes", "strategies", "keras_fit", "data")
REPLACED = {  # attributes of Keras's objects that some room replaces
    *["call", "next", "assign", "assign_add", "assign_sub", "momentum", "_moments"],
    *["_losses", "_loss_ids", "update_step"],
    *["finalize_variable_values", "add_variable_from_reference", "loss_scale_factor", "_learning_rate", "ema_momentum"],
    *["ema_overwrite_frequency", "_apply_weight_decay", "_all_reduce_sum_gradients", "scale_loss_for_distribution"],
    *["global_seed", "internal_operation_seed"],
}
# What Keras itself sets: `fit` on a model, and a recurrent cell's first call.
OF_KERAS = {"stop_training", "stop_evaluating", "history", "_dropout_mask", "_recurrent_dropout_mask"}
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
        for key in (own.keys() | after[name].keys()) - OF_KERAS:
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


@pytest.mark.slow
def test_model_optimizer_and_layers_are_as_the_user_made_them(tmp_path: pathlib.Path) -> None:
    done = run_python(["-m", "keras_patches.test_patches", tmp_path], cwd=REPOSITORY / "tests", timeout=240).check()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LEFT ")]
    assert json.loads(line.removeprefix("LEFT ")) == []


def test_attributes_are_put_back_in_reverse_order_after_an_exception_too() -> None:
    owner = types.SimpleNamespace(a=1)
    with pytest.raises(KeyError), Patches() as patches:
        patches.replace(owner, a=2, b=3)
        patches.replace(owner, a=4)
        patches.restore_at_end(owner, "c")
        owner.c = 5
        assert vars(owner) == {"a": 4, "b": 3, "c": 5}
        raise KeyError
    assert vars(owner) == {"a": 1}


def test_tensorflows_seed_functions_are_its_own_outside_of_a_users_dataset() -> None:
    global_seed, operation_seed = context.global_seed, context.internal_operation_seed
    with user_dataset._global_seed(3):
        assert context.global_seed() == 3 and context.internal_operation_seed is not operation_seed
    assert (context.global_seed, context.internal_operation_seed) == (global_seed, operation_seed)
    assert global_seed.__module__ == context.__name__


def test_no_other_place_replaces_what_is_kerass() -> None:
    found = []
    for path, tree in parse_package().items():
        if path.relative_to(REPOSITORY / "tfdist").parts[0] not in ROOMS:
            continue
        for node in ast.walk(tree):
            names = [*node.targets] if isinstance(node, ast.Assign | ast.Delete) else []
            flat = [each for name in names for each in (name.elts if isinstance(name, ast.Tuple) else [name])]
            found += [f"{path}: {ast.unparse(node)}" for each in flat if is_replaced(each)]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("object.__setattr__", "object.__delattr__"):
                found.append(f"{path}: {ast.unparse(node)}")
    assert not found


def is_replaced(target: ast.expr) -> bool:
    """Whether it is such an attribute, of something other than `self` or a module's own `_computing`."""
    is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "_computing")
    return isinstance(target, ast.Attribute) and target.attr in REPLACED and not is_own


if __name__ == "__main__":
    left = []
    for chosen in ("mirrored2", "one_device"):  # in this order: the first makes two devices of the CPU
        strategy = STRATEGIES[chosen]()
        strategy.connect()
        left += train(strategy, pathlib.Path(sys.argv[1], chosen))
    print("LEFT", json.dumps(left))
