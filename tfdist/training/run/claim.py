"""Takes possession of a run directory: it can be written, nobody else uses it, and it holds no other experiment.

Invariant: of the workers of a run only the chief looks, and all of them learn what it found. What decides whether it is
the same experiment is the settings that say what is trained; those that say who computes, for how long, and how it is
saved and told may change from one start to the next. `open_run` calls this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import keras

from tfdist.checkpoint.catalog import list_paths, read_newest_first
from tfdist.errors import UserError, build_user_error, shorten_list
from tfdist.storage import files, lease
from tfdist.strategies.strategy import Strategy
from tfdist.telemetry.records import remove_stale
from tfdist.telemetry.result import TRAIN, TUNE, RunResult, Start, Starts, read_mode, read_result, read_starts
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.loop.callbacks import BACKUP, KERAS_FILE
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TrainSettings

MAY_CHANGE = frozenset(TrainSettings.changeable())
MAY_CHANGE_BELOW = (
    *("tfdist.strategies.", "tfdist.checkpoint.", "tfdist.tuning.", "evaluate.", "tune."),
    f"{keras.callbacks.BackupAndRestore.__module__}.",
)
MOST_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class RunClaim:
    """The claim of this worker on its run directory.

    Attributes:
      is_finished: whether it holds a result, and nothing is left to train.
      extends: whether it holds the result of a shorter run, which continues.
      said: on the chief, a sentence about that result.
      starts: of the run, by processes before this one; on the chief.
      warnings: of damaged files, on the chief.
      held: the leases, on the chief: of the directory, and of a training's checkpoints where they are elsewhere.
    """

    is_finished: bool = False
    extends: bool = False
    said: str = ""
    starts: Sequence[Start] = ()
    warnings: Sequence[str] = ()
    held: tuple[lease.Lease, ...] = ()

    def check(self) -> None:
        """Raises LeaseLostError where another run has taken the directory."""
        for each in self.held:
            each.check()

    def release(self) -> None:
        """Releases the directory."""
        for each in self.held:
            each.release()


def lock_run_directory(
    directory: RunDirectory,
    strategy: Strategy,
    request: Request,
    settings: TrainSettings | None,
    *,
    mode: str,
    check: Callable[[], object] = lambda: None,
    notify: Callable[[str], None],
) -> RunClaim:
    """Makes and locks the run directory; deletes what is in it if the request begins empty. A collective.

    Args:
      directory: of the run.
      strategy: connected.
      request: from the caller.
      settings: of a training, which takes the run's lease; None takes that of the mode.
      mode: as `open_run` has it.
      check: called on the chief first; raises where nothing is to be made.
      notify: takes what the user should know while waiting.

    Raises:
      UserError: it cannot be written, or it holds something else; on every worker.
      InUseError: another live run has it; on the chief, and UserError with its exit status on the others.
    """

    def take() -> RunClaim:
        check()
        directory.create()
        name = f"{lease.NAME}-{mode}" if settings is None else lease.NAME
        owner = f"--mode={mode}" if settings is None else "a training"
        held = [lease.acquire(directory.path, owner=owner, notify=notify, name=name)]
        try:
            if settings is not None and directory.checkpoint_dir not in (None, directory.path):
                held.append(lease.acquire(directory.checkpoint_dir, owner=owner, notify=notify))
            remove_stale(directory.path, mode)
            if settings is not None and request.begins_empty:
                for name in set(files.list_names(directory.path)) - {lease.NAME}:
                    path = files.join(directory.path, name)
                    files.remove_tree(path) if files.is_dir(path) else files.remove(path)
            warnings: list[str] = []
            starts = read_starts(directory, warnings.append)
            claim = RunClaim() if settings is None else _inspect(directory, request, settings, starts)
            return dataclasses.replace(claim, starts=starts.starts, warnings=warnings, held=tuple(held))
        except BaseException:
            RunClaim(held=tuple(held)).release()
            raise

    failed = f"{directory.path} cannot be used"
    claim = strategy.on_chief(take, failed) or RunClaim()
    # For the logs of each, where workers share no disk.
    strategy.on_every_worker(lambda: files.make_dirs(directory.path), failed)
    return dataclasses.replace(
        claim, is_finished=strategy.any_worker(claim.is_finished), extends=strategy.any_worker(claim.extends)
    )


def _inspect(directory: RunDirectory, request: Request, settings: TrainSettings, last: Starts) -> RunClaim:
    """Checks a training against its directory and its `last` start; returns the claim, without leases."""
    check_kind(directory, TRAIN)
    result = read_result(directory)
    _check_checkpoint_dir(directory, last.checkpoint_dir)
    if not settings.accept_changes:
        of_finished = last.settings if result is not None else None
        check_same_experiment(directory, request.settings(), of_finished=of_finished)
    return RunClaim() if result is None else _find_finished(directory, result, settings)


def _check_checkpoint_dir(directory: RunDirectory, last: str | None) -> None:
    """Raises UserError where the run would not find the checkpoints of its last start, or takes Keras's for its own."""
    before = RunDirectory(directory.path, last).checkpoints
    if before != directory.checkpoints and list_paths(before):
        raise UserError(
            f"The checkpoints of {directory.path} are in {before}, and this start looks for them in "
            f"{directory.checkpoints}. Move them there, or write {BACKUP}.backup_dir = {before!r}."
        )
    if directory.checkpoint_dir is not None and KERAS_FILE in files.list_names(directory.checkpoint_dir):
        raise UserError(
            f"{directory.checkpoint_dir} holds a backup of {BACKUP} in keras.Model.fit, from which tfdist cannot "
            f"resume. Give another backup_dir; train.start_from = {files.join(directory.checkpoint_dir, KERAS_FILE)!r} "
            "begins with its weights."
        )


def _find_finished(directory: RunDirectory, result: RunResult, settings: TrainSettings) -> RunClaim:
    """Whether more is asked for than the run with this result has done.

    Raises:
      UserError: it is, and there is nothing to resume from.
    """
    done, epochs = result.steps, result.epochs
    steps_per_epoch = result.steps_per_epoch or (epochs and done // epochs)
    total = settings.total_steps(steps_per_epoch) if steps_per_epoch else done
    had = f"{directory.path} holds this run, and it is finished: {done:,} steps, {epochs:,} epochs"
    if result.end_reason != "completed":
        by = result.stopped_by or "a callback"
        return RunClaim(is_finished=True, said=f"{had}, then {by} stopped it. More epochs do not change that.")
    if total <= done:
        asked = "as many as are asked for" if total == done else f"more than the {total:,} steps that are asked for"
        lacks = f" Only {directory.model} is missing; remove {directory.result}, and the next start writes it."
        is_exported = any(map(files.exists, (directory.model, directory.model_weights)))
        said = f"{had}, {asked}. Nothing is left to train.{'' if is_exported else lacks}"
        return RunClaim(is_finished=True, said=said)
    if settings.policy is None or not list_paths(directory.checkpoints):
        why = "train.checkpoint is 'off'" if settings.policy is None else "it kept no checkpoint"
        raise UserError(
            f"{had}. It cannot continue to step {total:,}, because {why}. Give another --run_dir; "
            f"train.start_from = {directory.model!r} begins with its weights."
        )
    return RunClaim(extends=True, said=f"The run in {directory.path} was finished at step {done:,}.")


WORDS = {TRAIN: "training", TUNE: "sweep"}


def check_kind(directory: RunDirectory, mode: str) -> None:
    """Raises UserError where the directory holds a run of another kind, or its result.json is damaged."""
    found, name = read_mode(directory), directory.result
    if found is None:
        signs = ((TUNE, directory.sweep), (TRAIN, directory.starts), (TRAIN, directory.metrics))
        found, name = next(((kind, path) for kind, path in signs if files.exists(path)), (None, ""))
    if found not in (None, mode):
        raise build_user_error(
            f"{directory.path} holds a {WORDS.get(found, found)} ({name.rpartition('/')[2]}), and this is a "
            f"{WORDS[mode]}: a run directory belongs to one run. Give another --run_dir.",
            error_id="another-experiment",
        )


def check_same_experiment(
    directory: RunDirectory, settings: Mapping[str, str], *, of_finished: Mapping[str, str] | None
) -> None:
    """Raises UserError where the newest checkpoint is of another experiment, with the settings that differ.

    A finished run without a checkpoint is known by its last start, whose settings are `of_finished`. One that came to
    neither may be begun with others.
    """
    newest = None
    for entry in read_newest_first(directory.checkpoints):
        entry.check_format()
        if (newest := entry.manifest) is not None:
            break
    if newest is not None:
        theirs, where = newest.identity.get("settings", {}), f"at step {newest.step:,}"
    elif of_finished:
        theirs, where = of_finished, "which is finished"
    else:
        return
    lines = [
        f"{name}: {theirs.get(name, 'the default')} there, {settings.get(name, 'the default')} here"
        for name in differing_settings(theirs, settings)
    ]
    refuse_differences(directory, lines, where, resumes=newest is not None)


def refuse_differences(directory: RunDirectory, lines: Sequence[str], where: str, *, resumes: bool = True) -> None:
    """Raises UserError where the experiment in a directory differs by any lines; `resumes`: from a checkpoint."""
    if lines:
        of_backup = resumes and directory.checkpoint_dir is not None
        path, another = (directory.checkpoints, "backup_dir") if of_backup else (directory.path, "--run_dir")
        head = f"{path} holds another experiment, {where}; what differs:"
        change = ", or write train.accept_changes = True to resume from its newest checkpoint with what is here"
        told = "\n    ".join([head, *shorten_list(lines, MOST_SHOWN)])
        raise build_user_error(
            f"{told}\nGive another {another}{change if resumes else ''}.", error_id="another-experiment"
        )


def differing_settings(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """The names of the settings that say what is trained and are not the same."""
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    return [name for name in names if not _may_change(name)]


def select_fixed_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that may not change when a run resumes."""
    return {name: text for name, text in settings.items() if not _may_change(name)}


def _may_change(name: str) -> bool:
    setting = name.rpartition("/")[2]
    return setting in MAY_CHANGE or setting.startswith(MAY_CHANGE_BELOW)
