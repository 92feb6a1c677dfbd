"""A model's way out of a run and into one: exported, and given the weights of a checkpoint or a file.

Invariant: the chief exports, the whole or nothing; what is found is the same on every worker.
"""

from __future__ import annotations

import json
import os
import tempfile

import keras

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.errors import UserError
from tfdist.recipes.lora import adapter_bytes, adapter_of, kept_adapters
from tfdist.storage import files
from tfdist.telemetry import heartbeat
from tfdist.telemetry.json_text import to_json
from tfdist.training.recovery.recovery import restored
from tfdist.training.recovery.weights import FILES, Found, find
from tfdist.training.run.run import Run
from tfdist.training.step.state import ModelState
from tfdist.user_code import said


def export_model(run: Run, model: keras.Model) -> None:
    """Writes export/model.keras, and the adapter of one that is adapted, whole or not at all, on the chief."""
    heartbeat.beat(heartbeat.FINISHING)
    if not run.topology.is_chief:
        return
    if not run.request.keeps:
        return
    with tempfile.TemporaryDirectory(prefix="tfdist-export-") as scratch:
        path = os.path.join(scratch, "model.keras")
        model.save(path)
        files.make_dirs(run.directory.export)
        with open(path, "rb") as saved:
            files.write_atomic(run.directory.model, saved.read())
    adapter = adapter_of(model)
    if adapter:
        files.write_atomic(run.directory.adapter, adapter_bytes(adapter))


def find_weights(run: Run, weights: str | int | None, policy: CheckpointPolicy | None, *, setting: str) -> Found:
    """What a setting, such as `evaluate.weights`, names.

    A collective: the chief looks, the others learn what it found, without the values.

    Raises:
      UserError: there is no such thing; on every worker.
    """
    found = run.strategy.on_chief(
        lambda: find(weights, run.directory, policy, tell=run.events, setting=setting), "The checkpoints cannot be read"
    )
    if run.topology.num_workers == 1:
        assert found is not None
        return found
    text = to_json([found.path, found.step, found.why]).encode() if found is not None else None
    path, step, why = json.loads(bytes(run.strategy.broadcast(text)))
    return found or Found(path, step, None, why)


def put_weights(run: Run, model: keras.Model, found: Found) -> None:
    """Gives a built model the weights. A collective.

    Raises:
      UserError: they do not fit.
    """
    if found.step is None:
        load_weights(model, found.path)
    else:
        restored(run.strategy, ModelState(model), lambda: found.state, partial=False, tell=run.events, only_model=True)


def load_weights(model: keras.Model, path: str) -> None:
    """Loads a .keras or .weights.h5 file, local or gs://, into a built model.

    Raises:
      UserError: it cannot be read, or its variables are not the model's.
    """
    suffix = next((s for s in FILES if path.endswith(s)), None)
    if suffix is None:
        raise UserError(f"Weights are read from {' and '.join(FILES)} files; received {path!r}.")
    with tempfile.TemporaryDirectory(prefix="tfdist-weights-") as scratch:
        copy = os.path.join(scratch, f"model{suffix}")
        try:
            with open(copy, "wb") as target:
                target.write(files.read(path))
            with kept_adapters(model):
                model.load_weights(copy)
        except Exception as error:  # Keras's readers raise what zipfile, h5py and json do
            raise UserError(f"The weights in {path} do not load into this model: {said(error)}") from error
