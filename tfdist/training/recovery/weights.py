"""A model's way out of a run and into one: exported, and given the weights that a setting names.

Invariant: the chief exports, the whole or nothing; what is found is the same on every worker, exists and, for a
checkpoint, has every byte that it was written with. Whatever is not found is a UserError that lists what there is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfdist.checkpoint import catalog, restore
from tfdist.checkpoint.catalog import Entry, list_checkpoints, list_paths
from tfdist.checkpoint.format.manifest import NAME as MANIFEST
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.restore import State
from tfdist.errors import UserError, build_user_error
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.lora import adapter_bytes, read_adapter, restore_adapters
from tfdist.storage import files
from tfdist.tasks.task import overrides
from tfdist.telemetry import heartbeat
from tfdist.telemetry.events import EventLog
from tfdist.telemetry.result import find_checkpoint_dir
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.loop.learner import symbols_of
from tfdist.training.recovery.matching import SavedArray, match_arrays
from tfdist.training.recovery.origins import (
    HDF5_FILES,
    KERAS_FILES,
    KINDS,
    StartFrom,
    copy_locally,
    find_origin,
    hash_files,
    is_of_keras_2,
    open_arrays,
)
from tfdist.training.recovery.recovery import log_left_out
from tfdist.training.recovery.slots import load_slots
from tfdist.training.run.run import Run
from tfdist.training.step.state import MODEL, OPTIMIZER, ModelState, TrainingState
from tfdist.training.watch.equality import check_agreement
from tfdist.user_code import format_exception

BEST, LAST = "best", "last"
START_FROM = "train.start_from"


@dataclasses.dataclass(frozen=True)
class SavedWeights:
    """Weights in a store.

    Attributes:
      path: the file, or the checkpoint's directory.
      step: of the checkpoint; None for a file, which does not say it.
      state: the checkpoint; None for a file.
      why: what makes a checkpoint the best one, "val_accuracy 0.9833"; empty otherwise.
    """

    path: str
    step: int | None = None
    state: State | None = None
    why: str = ""

    def describe(self) -> str:
        """Returns their name for messages."""
        if self.step is None:
            return self.path
        return f"step {self.step:,}{f' ({self.why})' if self.why else ''}, {self.path}"


def find_by_path(path: str, setting: str, *, tell: EventLog) -> SavedWeights:
    """A file, one checkpoint, or the newest whole one of a run directory or a directory of checkpoints.

    Raises:
      UserError: there is none that is whole; `setting` names the path.
    """
    found = locate_weights(path, setting)
    if files.exists(files.join(found, MANIFEST)):
        return _load(found)
    if find_origin(found) is not None:
        return SavedWeights(found)
    return _find_newest(found, f"No checkpoint in {setting} = {path!r} is whole.", tell)


def locate_weights(path: str, setting: str) -> str:
    """The path of a file, of one checkpoint, or of a directory that has some; reads none of them.

    Raises:
      UserError: there is none; `setting` names the path.
    """
    if files.is_dir(path):
        if files.exists(files.join(path, MANIFEST)):
            return path
        for directory in list_checkpoint_dirs(path):
            if files.is_dir(directory) and list_paths(directory):
                return directory
    if find_origin(path) is not None:
        return path
    if path.endswith((*HDF5_FILES, ".safetensors")):
        raise UserError(f"There is no file {setting} = {path!r}.")
    others = "'best', 'last', a step, " if setting.endswith(".weights") else ""
    raise UserError(f"{setting} = {path!r} is no weights that can be read. Write {others}{KINDS}.")


def list_checkpoint_dirs(path: str) -> tuple[str, str]:
    """Lists the directories of checkpoints of a run directory, or of a directory of checkpoints."""
    return RunDirectory(path, find_checkpoint_dir(path)).checkpoints, path


def find_exported(run: RunDirectory, setting: str = "evaluate.weights") -> SavedWeights:
    """The model that the run has exported; raises UserError where it has none yet."""
    for path in (run.model, run.model_weights):
        if files.exists(path):
            return SavedWeights(path)
    steps = _list_steps(run)
    advice = f"Write {setting} = 'last' for the newest checkpoint; there are {steps}" if steps else "Train first"
    raise UserError(f"There are no trained weights at {run.model}. {advice}, or write {setting} = 'FILE'.")


def _find_step(step: int, run: RunDirectory) -> SavedWeights:
    found = next((entry for entry in _list_whole(run) if entry.step == step), None)
    if found is None:
        raise UserError(f"{run.path} has no checkpoint of step {step:,}. It has {_list_steps(run) or 'none'}.")
    return _load(found.path)


def _find_best(run: RunDirectory, policy: CheckpointPolicy | None, setting: str) -> SavedWeights:
    if policy is None or policy.keep_best is None:
        raise UserError(
            f"{setting} is 'best', and the run was not told which checkpoint is the best one. Train with "
            "policy.CheckpointPolicy.keep_best = 'val_accuracy', or another metric; or write a step. "
            f"{run.path} has checkpoints of {_list_steps(run) or 'no step'}."
        )
    found = catalog.find_best(_list_whole(run), policy)
    if found is None:
        raise UserError(f"No checkpoint in {run.path} has the metric {policy.keep_best!r}, by which the best is told.")
    value, best = found
    return dataclasses.replace(_load(best.path), why=f"best {policy.keep_best} {value:.4g}")


def _find_newest(directory: str, otherwise: str, tell: EventLog) -> SavedWeights:
    state = restore.load_newest(directory, tell=tell)
    if state is None:
        raise UserError(otherwise)
    return SavedWeights(state.path or directory, state.step, state)


def _load(path: str) -> SavedWeights:
    state = restore.load(path)
    return SavedWeights(path, state.step, state)


def _list_whole(run: RunDirectory) -> list[Entry]:
    """The checkpoints that are whole, newest first."""
    entries = [*list_checkpoints(run.checkpoints), *list_checkpoints(run.best)]
    whole = [entry for entry in entries if entry.manifest is not None]
    return sorted(whole, key=lambda entry: entry.age_order, reverse=True)


def _list_steps(run: RunDirectory) -> str:
    return ", ".join(f"{step:,}" for step in sorted({entry.step for entry in _list_whole(run)}))


def export_model(run: Run, model: keras.Model, inputs: Any) -> str:
    """Writes export/model.keras, and the adapter of one that is adapted, whole or not at all, on the chief.

    Of a model that Keras cannot load again it writes the weights alone, and says so.

    Args:
      run: of the training.
      model: trained.
      inputs: nest of `tf.TensorSpec`s, with which a model that only its own step called is built.

    Returns:
      The path that the chief has written, or would write if the run were kept.
    """
    heartbeat.beat(heartbeat.FINISHING)
    target = run.directory.model
    if not run.topology.is_chief or not run.request.keeps:
        return target
    with tempfile.TemporaryDirectory(prefix="tfdist-export-") as scratch:
        path = os.path.join(scratch, "model.keras")
        if lack := _save_whole(model, path, inputs):
            target, path = run.directory.model_weights, os.path.join(scratch, "model.weights.h5")
            with Patches() as patches:
                patches.replace(model, built=True)  # which a model without a call of its own never is
                model.save_weights(path)
            name = type(model).__name__
            run.note("model_not_saved", f"Keras cannot save {name}, which has {lack}; {target} has its weights.")
        files.make_dirs(run.directory.export)
        with open(path, "rb") as saved:
            files.write_atomic(target, saved.read())
    adapter = read_adapter(model)
    if adapter:
        files.write_atomic(run.directory.adapter, adapter_bytes(adapter))
    return target


def _save_whole(model: keras.Model, path: str, inputs: Any) -> str | None:
    """Saves a model; why Keras cannot load it, "no get_config", or None where it can."""
    if not model.built and overrides(model, "call"):
        with contextlib.suppress(Exception):  # whatever a call raises that no step of the training made
            model(symbols_of(inputs))
    try:
        model.save(path)
    except (NotImplementedError, TypeError, ValueError) as error:
        return "no get_config" if isinstance(error, NotImplementedError) else "a get_config that Keras cannot write"
    return None if model.built else "no call"


def check_exported(run_dir: str, weights: str | int | None) -> None:
    """Raises UserError where a run has exported no model, and a setting of `weights` names nothing else."""
    if weights is None:
        find_exported(RunDirectory(run_dir))


def find_weights(run: Run, weights: str | int | None, policy: CheckpointPolicy | None, *, setting: str) -> SavedWeights:
    """The weights that a setting names, such as `evaluate.weights`; None is the model that the run has exported.

    A collective: the chief looks, the others learn what it found, without the values. The policy says by which metric a
    checkpoint is the best one.

    Raises:
      UserError: there is no such thing; on every worker.
    """
    directory = run.directory

    def find() -> SavedWeights:
        if weights is None:
            return find_exported(directory, setting)
        if isinstance(weights, int):
            return _find_step(weights, directory)
        if weights == LAST:
            return _find_newest(directory.checkpoints, f"{directory.path} has no checkpoint that is whole.", run.events)
        if weights == BEST:
            return _find_best(directory, policy, setting)
        return find_by_path(RunDirectory(weights).path, setting, tell=run.events)

    return find_on_chief(run, find)


def find_on_chief(run: Run, find: Callable[[], SavedWeights]) -> SavedWeights:
    """Calls `find` on the chief; the others learn of the result without the values. A collective."""
    found: list[SavedWeights] = []

    def read() -> tuple[str, int | None, str]:
        found.append(find())
        return found[0].path, found[0].step, found[0].why

    path, step, why = run.strategy.read_on_chief(read, "The checkpoints cannot be read")
    return found[0] if found else SavedWeights(path, step, None, why)


def put_weights(
    run: Run,
    model: keras.Model,
    found: SavedWeights,
    *,
    state: TrainingState | None = None,
    start: StartFrom | None = None,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> Sequence[str]:
    """Gives a built model the weights, which the chief reads and sends; its report. A collective.

    Where each worker has parts of variables, every one reads a file.

    Args:
      run: open.
      model: built.
      found: by the chief.
      state: of a training with this model.
      start: how they are matched.
      optimizer: of `state`, for `StartFrom.optimizer`.

    Raises:
      UserError: they do not fit, or the workers read different ones; on every worker.
    """
    strategy, path, failed = run.strategy, found.path, f"{found.path} cannot be read"

    def load() -> Loaded:
        loaded = load_weights(model, found, state=state, start=start)
        if state is not None and optimizer is not None:
            with open_weights(found) as (_, saved):
                loaded.report.extend(load_slots(state, model, optimizer, saved, loaded.sources))
        return loaded

    if state is not None and state.is_sharded:
        if found.step is None:
            digest = strategy.on_every_worker(lambda: hash_files(path), failed)
            check_agreement(strategy, lambda: {f"sha256 of {path}": digest})
        loaded = strategy.on_every_worker(load, failed)
    else:
        loaded = strategy.on_chief(load, failed) or Loaded([], [], {})
        strategy.send_variables([*model.variables, *(optimizer.variables if optimizer is not None else ())])
    log_left_out(run.events, loaded.left_out, path)
    return loaded.report


class Loaded(NamedTuple):
    """What was loaded.

    Attributes:
      report: a line for each variable, from where and how; of a file that Keras has read a single one.
      left_out: a line for each variable, array or object that did not fit.
      sources: by the model's variables, the arrays' names in the file; of a file that Keras has read their own.
    """

    report: list[str]
    left_out: Sequence[str]
    sources: Mapping[str, str]


def load_weights(
    model: keras.Model,
    weights: SavedWeights | str,
    *,
    state: TrainingState | None = None,
    start: StartFrom | None = None,
) -> Loaded:
    """Loads a checkpoint or a file of any origin, local or gs://, into a built model.

    Args:
      model: built.
      weights: a checkpoint, or the path of a file. Keras reads its own, unless `start` has names.
      state: of a training with this model.
      start: how they are matched.

    Raises:
      UserError: it cannot be read, or its variables are not the model's.
    """
    found = weights if isinstance(weights, SavedWeights) else SavedWeights(weights)
    start = start or StartFrom(found.path)
    if found.path.endswith(KERAS_FILES) and start.names is None:
        with copy_locally(found.path) as local:
            if not is_of_keras_2(local):
                return _load_by_keras(model, found.path, local, partial=start.partial)
    specs = {name.removeprefix(MODEL): spec for name, spec in ModelState(model).specs().items()}
    with open_weights(found) as (kind, saved):
        match = match_arrays(saved, specs, start.names, exact=found.step is not None)
        if found.step is not None and not match.sources:  # an own step calls layers in another order, which names them
            match = match_arrays(saved, specs, start.names)
        if not start.partial or not match.sources:
            match.check(f"{found.path} ({kind})", len(specs))
        arrays = match.read(saved, specs)
    (state or ModelState(model)).assign({f"{MODEL}{name}": array for name, array in arrays.items()})
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # which computes with its variables' values
    report = match.report() if found.step is None or start.names or match.problems else []
    return Loaded(report, match.problems, {name: source.name for name, source in match.sources.items()})


@contextlib.contextmanager
def open_weights(weights: SavedWeights) -> Iterator[tuple[str, Mapping[str, SavedArray]]]:
    """The kind and the model's arrays by name; as `open_arrays`."""
    if weights.step is None:
        with open_arrays(weights.path) as opened:
            yield opened
        return
    tensors = (weights.state or restore.load(weights.path)).tensors
    named = {n.removeprefix(MODEL): array for n, array in tensors.items() if n.startswith((MODEL, OPTIMIZER))}
    yield f"step {weights.step:,}", {name: SavedArray.of(array) for name, array in named.items()}


def _load_by_keras(model: keras.Model, path: str, local: str, *, partial: bool) -> Loaded:
    """Loads a file of Keras 3, which lies at `local`; of `partial` Keras says which objects it left out."""
    try:
        with restore_adapters(model), warnings.catch_warnings(record=True, action="always") as caught:
            model.load_weights(local, skip_mismatch=partial)
    except Exception as error:  # Keras's readers raise what zipfile, h5py and json do
        told = format_exception(error).partition(" Target variable: ")[0]  # of which Keras shows the values
        raise build_user_error(
            f"The weights in {path} do not load into this model: {told}", error_id="checkpoint-mismatch"
        ) from error
    messages = [str(each.message) for each in caught]
    left_out = [text.rpartition("\n")[2] for text in messages if "could not be loaded" in text]  # in its last line
    report = [f"{len(model.variables):,} variables: by Keras, in the order of the layers"]
    return Loaded(report, left_out, {(own := name.removeprefix(MODEL)): own for name in ModelState(model).specs()})
