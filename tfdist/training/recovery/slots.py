"""Loads an optimizer's variables from a file, by the weights that they belong to; for `StartFrom.optimizer`.

Invariant: slots count with the number of updates that made them, and of the same kind of optimizer, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import keras
import numpy as np

from tfdist.training.recovery.matching import SavedArray
from tfdist.training.step.state import MODEL, OPTIMIZER, TrainingState, model_variables

SLOTS = {"SGD": ("momentum",), "Adam": ("momentum", "velocity"), "AdamW": ("momentum", "velocity")}
SHORT = {"momentum": "m", "velocity": "v"}  # as Keras 2 calls them
RATE = f"{OPTIMIZER}learning_rate"  # a setting, which no file changes


def load_slots(
    state: TrainingState,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    saved: Mapping[str, SavedArray],
    weights: Mapping[str, str],
) -> list[str]:
    """Loads slots and the number of updates; a line for each: from where, or that it begins at its initial value.

    Args:
      state: of the training of `model` with `optimizer`.
      saved: the file's arrays; those of its optimizer are "optimizer/adam/…", in a checkpoint of tfdist "optimizer/…".
      weights: by the model's variables, the names in the file of the arrays that they were loaded from.
    """
    specs = {name: spec for name, spec in state.specs().items() if name.startswith(OPTIMIZER) and name != RATE}
    slots = SLOTS.get(type(optimizer).__name__, ()) if getattr(optimizer, "momentum", True) else ()
    kinds = {kind.lower() for kind, its in SLOTS.items() if its == SLOTS.get(type(optimizer).__name__)}
    paths = {name: name.removeprefix(OPTIMIZER).split("/") for name in saved if name.startswith(OPTIMIZER)}
    there = {"_".join(path[re.sub(r"_\d+$", "", path[0].lower()) in kinds :]): name for name, path in paths.items()}
    flat = {name: weight.replace("/", "_") for name, weight in weights.items()}
    if "vars_0" in there:  # of a .keras file, which has numbers for names
        names = {id(v): name.removeprefix(MODEL) for name, v in model_variables(model).items()}
        labels = [f"{flat[names[id(v)]]}_{slot}" for v in model.trainable_variables for slot in slots]
        order = ["iteration", "learning_rate", *labels]
        there = {label: there[f"vars_{i}"] for i, label in enumerate(order)} if len(order) == len(there) else {}
    found = {
        f"{OPTIMIZER}{name}/{slot}": there[label]
        for name, weight in flat.items()
        for slot, short in SHORT.items()
        for label in (f"{weight}_{slot}", f"{weight}_{short}", f"{short}_{weight}")
        if label in there
    }
    is_alike = kinds and "iteration" in there and {name.rpartition("/")[2] for name in found} == set(slots)
    found = found | {f"{OPTIMIZER}iteration": there["iteration"]} if is_alike else {}
    found = {n: source for n, source in found.items() if n in specs and saved[source].shape == specs[n][0]}
    state.assign({name: np.asarray(saved[source].read(), specs[name][1]) for name, source in found.items()})
    return [f"{name}: {found.get(name, 'begins at its initial value')}" for name in specs]
