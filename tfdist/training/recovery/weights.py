"""Finds the weights that an evaluation names: the exported model, the best or the last checkpoint, a step's, or a file.

Invariant: what is found exists and, for a checkpoint, has every byte that it was written with; whatever is not found is
a UserError that lists what there is.
"""

from __future__ import annotations

import dataclasses

from tfdist.checkpoint import catalog, restore
from tfdist.checkpoint.catalog import Entry, list_checkpoints, list_paths
from tfdist.checkpoint.format.manifest import NAME as MANIFEST
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.state import EventSink, State
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.run.directory.starts import find_checkpoint_dir

BEST, LAST = "best", "last"
FILES = (".keras", ".weights.h5")


@dataclasses.dataclass(frozen=True)
class Found:
    """Weights that are there.

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

    def described(self) -> str:
        """How a message calls them."""
        if self.step is None:
            return self.path
        return f"step {self.step:,}{f' ({self.why})' if self.why else ''}, {self.path}"


def find(
    weights: str | int | None,
    run: RunDirectory,
    policy: CheckpointPolicy | None,
    *,
    tell: EventSink,
    setting: str = "evaluate.weights",
) -> Found:
    """The weights that a setting names.

    Args:
      weights: as in `EvaluateSettings`; None is the model that the run has exported.
      run: whose checkpoints and model are meant.
      policy: of the run: says by which metric a checkpoint is the best one.
      tell: gets a warning of each damaged checkpoint that is passed over.
      setting: its name, for messages.
    """
    if weights is None:
        return find_exported(run, setting)
    if isinstance(weights, int):
        return _of_step(weights, run)
    if weights == LAST:
        return _newest(run.checkpoints, f"{run.path} has no checkpoint that is whole.", tell)
    if weights == BEST:
        return _best(run, policy, setting)
    path = RunDirectory(weights).path
    if path.endswith(FILES):
        if not files.exists(path):
            raise UserError(f"There is no file {setting} = {path!r}.")
        return Found(path)
    if (found := find_checkpoint(path, setting, tell=tell)) is not None:
        return found
    raise UserError(
        f"{setting} = {path!r} is no weights that can be read. Write 'best', 'last', a step, the directory of a "
        "checkpoint or of a run, or a file in .keras and .weights.h5 format."
    )


def find_checkpoint(path: str, setting: str, *, tell: EventSink) -> Found | None:
    """One checkpoint, or the newest whole one of a run directory or a directory of checkpoints; None where there is
    none.

    Raises:
      UserError: there are some, and none is whole; `setting` names the path.
    """
    if not files.is_dir(path):
        return None
    if files.exists(files.join(path, MANIFEST)):
        return _loaded(path)
    for directory in places_of_checkpoints(path):
        if files.is_dir(directory) and list_paths(directory):
            return _newest(directory, f"No checkpoint in {setting} = {path!r} is whole.", tell)
    return None


def places_of_checkpoints(path: str) -> tuple[str, str]:
    """Where the checkpoints are of what is a run directory or the directory of its checkpoints."""
    return RunDirectory(path, find_checkpoint_dir(path)).checkpoints, path


def find_exported(run: RunDirectory, setting: str = "evaluate.weights") -> Found:
    """The model that the run has exported; raises UserError where it has none yet."""
    if files.exists(run.model):
        return Found(run.model)
    steps = _steps(run)
    advice = f"Write {setting} = 'last' for the newest checkpoint; there are {steps}" if steps else "Train first"
    raise UserError(f"There are no trained weights at {run.model}. {advice}, or write {setting} = 'FILE'.")


def _of_step(step: int, run: RunDirectory) -> Found:
    found = [entry for entry in _entries(run) if entry.step == step]
    if not found:
        raise UserError(f"{run.path} has no checkpoint of step {step:,}. It has {_steps(run) or 'none'}.")
    return _loaded(max(found, key=lambda entry: entry.age_order).path)


def _best(run: RunDirectory, policy: CheckpointPolicy | None, setting: str) -> Found:
    if policy is None or policy.keep_best is None:
        raise UserError(
            f"{setting} is 'best', and the run was not told which checkpoint is the best one. Train with a "
            "policy that has keep_best = 'val_accuracy', or another metric; or write a step. "
            f"{run.path} has checkpoints of {_steps(run) or 'no step'}."
        )
    entries = sorted(_entries(run), key=lambda entry: entry.age_order, reverse=True)
    best = catalog.best(entries, policy)
    if best is None:
        raise UserError(f"No checkpoint in {run.path} has the metric {policy.keep_best!r}, by which the best is told.")
    assert best.manifest is not None
    return dataclasses.replace(
        _loaded(best.path), why=f"best {policy.keep_best} {best.manifest.metrics[policy.keep_best]:.4g}"
    )


def _newest(directory: str, otherwise: str, tell: EventSink) -> Found:
    state = restore.newest(directory, tell=tell)
    if state is None:
        raise UserError(otherwise)
    path = next(path for step, path in reversed(list_paths(directory)) if step == state.step)
    return Found(path, state.step, state)


def _loaded(path: str) -> Found:
    state = restore.load(path)
    return Found(path, state.step, state)


def _entries(run: RunDirectory) -> list[Entry]:
    return [entry for entry in list_checkpoints(run.checkpoints) if entry.manifest is not None]


def _steps(run: RunDirectory) -> str:
    return ", ".join(f"{step:,}" for step in sorted({entry.step for entry in _entries(run)}))
