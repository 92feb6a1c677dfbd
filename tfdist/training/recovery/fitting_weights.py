"""Takes of a file of weights what fits a model, and tells what it left out, of the file and of the model.

Invariant: what is told follows from both files' variables in Keras's own layout, so it is what Keras loaded and left: a
layer's variables in their order, up to the first that does not fit.
"""

from __future__ import annotations

import os
import tempfile
import warnings
import zipfile

import h5py
import keras

from tfdist.errors import UserError
from tfdist.recipes.lora import kept_adapters
from tfdist.storage import files

WEIGHTS_IN_KERAS_FILE = "model.weights.h5"
Layer = list[str]  # each variable's type and shape
Layers = dict[str, tuple[str, Layer]]  # by place in the file: the layer's name, its variables


def load_fitting(model: keras.Model, path: str) -> list[str]:
    """Loads what fits of a .keras or .weights.h5 file into a built model; a line for each variable that was left out.

    Raises:
      UserError: the file cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-weights-") as scratch:
        copy = os.path.join(scratch, "there.weights.h5")
        try:
            with open(copy, "wb") as target:
                target.write(files.read(path))
            if path.endswith(".keras"):
                with zipfile.ZipFile(copy) as archive:
                    os.replace(archive.extract(WEIGHTS_IN_KERAS_FILE, scratch), copy)
            theirs = _layers(copy)
            ours_file = os.path.join(scratch, "here.weights.h5")
            model.save_weights(ours_file)
            with (
                kept_adapters(model),
                warnings.catch_warnings(action="ignore"),
            ):  # Keras's own account of it, of layers alone
                model.load_weights(copy, skip_mismatch=True)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"The weights in {path} do not load into this model: {error}") from error
        return _left_out(_layers(ours_file), theirs)


def _layers(path: str) -> Layers:
    found: Layers = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Group) and name.rpartition("/")[2] == "vars" and len(item):
            variables = [item[str(index)] for index in range(len(item))]
            described = [f"{v.dtype.name}{list(v.shape)}" for v in variables]
            found[name] = (str(item.attrs.get("name", name)), described)

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def _left_out(ours: Layers, theirs: Layers) -> list[str]:
    lines = []
    for place, (name, here) in ours.items():
        there = theirs.get(place, (name, []))[1]
        fits = 0
        if len(there) == len(here):
            fits = next((i for i, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]), len(here))
        for index in range(fits, len(here)):
            held = f"{there[index]} in the file" if index < len(there) else "not in the file"
            lines.append(f"{name}, variable {index}: {held}, {here[index]} here")
        lines += [f"{name}, variable {i}: {there[i]} only in the file" for i in range(len(here), len(there))]
    for place, (name, there) in theirs.items():
        if place not in ours:
            lines += [f"{name}, variable {index}: {each} only in the file" for index, each in enumerate(there)]
    return lines
