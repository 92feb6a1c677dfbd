"""Takes possession of a run directory: it can be written, nobody else uses it, and it holds no other run.

Invariant: of the workers of a run only the chief looks, and all of them learn what it found. `open_run` calls this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.checkpoint.format.entries import list_paths
from tfdist.errors import UserError
from tfdist.storage import files, lease
from tfdist.strategies.base import Strategy
from tfdist.telemetry.result import TRAIN
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.loop.backup import KERAS_FILE
from tfdist.training.loop.backup import NAME as BACKUP
from tfdist.training.loop.boundaries import Length
from tfdist.training.run.directory.identity import check_same_experiment
from tfdist.training.run.directory.kind import check_kind
from tfdist.training.run.directory.starts import find_checkpoint_dir
from tfdist.training.run.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class Place:
    """A run directory, as this worker has it.

    Attributes:
      is_finished: whether it holds a result, and nothing is left to train.
      extends: whether it holds the result of a shorter run, which continues.
      said: on the chief, a sentence about that result.
      held: the leases, on the chief of a training: of the directory, and of its checkpoints' where that is another.
    """

    is_finished: bool = False
    extends: bool = False
    said: str = ""
    held: tuple[lease.Lease, ...] = ()

    def check(self) -> None:
        """Raises LeaseLostError where another run has taken the directory."""
        for each in self.held:
            each.check()

    def release(self) -> None:
        """Gives the directory back."""
        for each in self.held:
            each.release()


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a training wants of its directory.

    Attributes:
      settings: what is configured, by name.
      length: of the run; None never goes beyond a result.
      keeps_checkpoints: whether it resumes from one.
      accept_changes: continues with a run although other things are trained now.
      checkpoint_dir: of the checkpoints; None keeps them in the run directory.
    """

    settings: Callable[[], Mapping[str, str]]
    length: Length | None = None
    keeps_checkpoints: bool = True
    accept_changes: bool = False
    checkpoint_dir: str | None = None

    @classmethod
    def of(cls, settings: TrainSettings, configured: Callable[[], Mapping[str, str]]) -> Claim:
        """That of a training with such settings, which are `configured` under these names."""
        return cls(
            configured,
            settings.length,
            keeps_checkpoints=settings.policy is not None,
            accept_changes=settings.accept_changes,
            checkpoint_dir=None if settings.backup is None else settings.backup.directory,
        )


def take_place(
    directory: RunDirectory, strategy: Strategy, claim: Claim | None, *, notify: Callable[[str], None]
) -> Place:
    """The run directory, made if it is missing. A collective.

    Args:
      directory: of the run.
      strategy: connected.
      claim: of a training, which takes the lease; None only writes there.
      notify: takes what the user should know while waiting.

    Raises:
      UserError: it cannot be written, or it holds something else; on every worker.
      InUseError: another live run has it; on the chief, and UserError with its exit status on the others.
    """

    def take() -> Place:
        directory.create()
        return Place() if claim is None else _taken(directory, claim, notify=notify)

    place = strategy.on_chief(take, f"{directory.path} cannot be used") or Place()
    return dataclasses.replace(
        place, is_finished=strategy.any_worker(place.is_finished), extends=strategy.any_worker(place.extends)
    )


def _taken(directory: RunDirectory, claim: Claim, *, notify: Callable[[str], None]) -> Place:
    held: tuple[lease.Lease, ...] = ()
    try:
        for path in dict.fromkeys([directory.path, directory.checkpoint_dir or directory.path]):
            held = (*held, lease.acquire(path, owner="a training", notify=notify))
        result = check_kind(directory, TRAIN)
        _check_checkpoint_dir(directory)
        if not claim.accept_changes:
            check_same_experiment(directory, claim.settings(), is_finished=result is not None)
        if result is None:
            return Place(held=held)
        return dataclasses.replace(_finished(directory, result, claim), held=held)
    except BaseException:
        Place(held=held).release()
        raise


def _check_checkpoint_dir(directory: RunDirectory) -> None:
    """Raises UserError where the run would not find the checkpoints of its last start, or takes Keras's for its own."""
    before = RunDirectory(directory.path, find_checkpoint_dir(directory.path)).checkpoints
    if before != directory.checkpoints and list_paths(before):
        raise UserError(
            f"The checkpoints of {directory.path} are in {before}, and this start looks for them in "
            f"{directory.checkpoints}. Move them there, or write {BACKUP} with backup_dir = {before!r}."
        )
    if directory.checkpoint_dir is not None and KERAS_FILE in files.list_names(directory.checkpoint_dir):
        raise UserError(
            f"{directory.checkpoint_dir} holds a backup of {BACKUP} in keras.Model.fit, from which tfdist cannot "
            f"resume. Give another backup_dir; train.start_from = {files.join(directory.checkpoint_dir, KERAS_FILE)!r} "
            "begins with its weights."
        )


def _finished(directory: RunDirectory, result: Mapping[str, Any], claim: Claim) -> Place:
    """Whether more is asked for than the run with this result has done.

    Raises:
      UserError: it is, and there is nothing to resume from.
    """
    done, epochs = result["steps"], result["epochs"]
    steps_per_epoch = result.get("steps_per_epoch") or (epochs and done // epochs)
    total = claim.length.total_steps(steps_per_epoch) if claim.length is not None and steps_per_epoch else done
    had = f"{directory.path} holds this run, and it is finished: {done:,} steps, {epochs:,} epochs"
    if result.get("end_reason", "completed") != "completed":
        by = result.get("stopped_by") or "a callback"
        return Place(is_finished=True, said=f"{had}, then {by} stopped it. More epochs do not change that.")
    if total <= done:
        asked = "as many as are asked for" if total == done else f"more than the {total:,} steps that are asked for"
        return Place(is_finished=True, said=f"{had}, {asked}. Nothing is left to train.")
    if not claim.keeps_checkpoints or not list_paths(directory.checkpoints):
        why = "it kept no checkpoint" if claim.keeps_checkpoints else "train.checkpoint is 'off'"
        raise UserError(
            f"{had}. It cannot continue to step {total:,}, because {why}. Give another --run_dir; "
            f"train.start_from = {directory.model!r} begins with its weights."
        )
    return Place(extends=True, said=f"The run in {directory.path} was finished at step {done:,}.")
