"""A model's way out of a run and into one: exported, and given the weights of a checkpoint or a file.

Invariant: the chief exports, the whole or nothing; what is found is the same on every worker.
"""

from __future__ import annotations

import os
import tempfile

import keras

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.errors import UserError
from tfdist.recipes.lora import adapter_bytes, adapter_of, kept_adapters
from tfdist.storage import files
from tfdist.telemetry import heartbeat
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.recovery.recovery import load_checkpoint
from tfdist.training.recovery.weights import FILES, Found, find, find_exported
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


def check_exported(run_dir: str, weights: str | int | None) -> None:
    """Raises UserError where a run has exported no model, and a setting of `weights` names nothing else."""
    if weights is None:
        find_exported(RunDirectory(run_dir))


def find_weights(run: Run, weights: str | int | None, policy: CheckpointPolicy | None, *, setting: str) -> Found:
    """What a setting, such as `evaluate.weights`, names.

    A collective: the chief looks, the others learn what it found, without the values.

    Raises:
      UserError: there is no such thing; on every worker.
    """
    found: list[Found] = []

    def read() -> tuple[str, int | None, str]:
        found.append(find(weights, run.directory, policy, tell=run.events, setting=setting))
        return found[0].path, found[0].step, found[0].why

    path, step, why = run.strategy.read_on_chief(read, "The checkpoints cannot be read")
    return found[0] if found else Found(path, step, None, why)


def put_weights(run: Run, model: keras.Model, found: Found) -> None:
    """Gives a built model the weights, which the chief reads and sends. A collective.

    Raises:
      UserError: they do not fit; on every worker.
    """
    if found.step is None:
        run.strategy.on_chief(lambda: load_weights(model, found.path), f"{found.path} cannot be read")
        run.strategy.send_variables(model.variables)
    else:
        state = ModelState(model)
        checkpoint = load_checkpoint(
            run.strategy, state, lambda: found.state, partial=False, tell=run.events, only_model=True
        )
        assert checkpoint is not None
        checkpoint.restore()


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
            told = said(error).partition(" Target variable: ")[0]  # of which Keras shows the values
            raise UserError(f"The weights in {path} do not load into this model: {told}") from error
