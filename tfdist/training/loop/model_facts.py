"""What the workers compare of a model and its optimizer once these are built, as text by name.

Invariant: the text does not depend on what else a process has built: Keras's own numbers in names are left out.
"""

from __future__ import annotations

import hashlib
import json
import re

import keras


def describe_model(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """The configuration of both, and each variable's shape, type and whether it is trained."""
    trained = {id(v) for v in model.trainable_variables}
    facts = {f"type of the {name}": type(each).__name__ for name, each in (("model", model), ("optimizer", optimizer))}
    for number, variable in enumerate(model.variables):
        path = "/".join(map(_without_number, variable.path.split("/")))
        is_trained = "trained" if id(variable) in trained else "not trained"
        facts[f"variable {number}, {path}"] = f"{tuple(variable.shape)} {variable.dtype}, {is_trained}"
    settings = _configuration(optimizer)
    facts |= {f"{name} of the optimizer": _without_names(value) for name, value in settings.items() if name != "name"}
    layers = _without_names(_configuration(model))
    facts["digest of the model's configuration"] = hashlib.sha256(layers.encode()).hexdigest()[:16]
    return facts


def _configuration(made: keras.Model | keras.optimizers.Optimizer) -> dict[str, object]:
    """What Keras knows of it: nothing of a class that does not say it."""
    try:
        return dict(made.get_config())
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return {}


def _without_names(value: object) -> str:
    """A value as text, without the numbers and addresses that depend on the process."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return re.sub(r"0x[0-9a-f]+", "", re.sub(r'_\d+"', '"', text))


def _without_number(part: str) -> str:
    return re.sub(r"_\d+$", "", part)
