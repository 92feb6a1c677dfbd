"""Whether a run directory holds the same experiment, so that a run may continue there.

Invariant: what decides is the settings that say what is trained. Those that say who computes, for how long, and how it
is saved and told may change from one start to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfdist.checkpoint.catalog import newest_first
from tfdist.errors import UserError
from tfdist.telemetry.result import versions
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.run.settings import TrainSettings

MAY_CHANGE = frozenset(TrainSettings.changeable())
MAY_CHANGE_BELOW = (
    *("tfdist.strategies.", "tfdist.checkpoint.", "tfdist.tuning.", "evaluate.", "tune."),
    f"{keras.callbacks.BackupAndRestore.__module__}.",
)
MOST_SHOWN = 20


def identity(settings: Mapping[str, str], *, strategy: str, num_workers: int, num_replicas: int) -> dict[str, Any]:
    """What a checkpoint says of the run that made it."""
    return {
        "settings": dict(settings),
        "strategy": strategy,
        "num_workers": num_workers,
        "num_replicas": num_replicas,
        "versions": versions(),
    }


def check_same_experiment(
    directory: RunDirectory, settings: Mapping[str, str], *, of_finished: Mapping[str, str] | None
) -> None:
    """Raises UserError where the newest checkpoint is of another experiment, with the settings that differ.

    A finished run without a checkpoint is known by its last start, whose settings are `of_finished`. One that came to
    neither may be begun with others.
    """
    newest = None
    for entry in newest_first(directory.checkpoints):
        entry.check_format()
        if (newest := entry.manifest) is not None:
            break
    if newest is not None:
        theirs, where = newest.identity.get("settings", {}), f"at step {newest.step:,}"
    elif of_finished is not None:
        theirs, where = of_finished, "which is finished"
    else:
        return
    if newest is None and not theirs:
        return
    lines = [_difference(name, theirs, settings) for name in differing_settings(theirs, settings)]
    if lines:
        more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
        of_backup = newest is not None and directory.checkpoint_dir is not None
        place, another = (directory.checkpoints, "backup_dir") if of_backup else (directory.path, "--run_dir")
        head = f"{place} holds another experiment, {where}; its settings differ:"
        change = ", or write train.accept_changes = True to resume from its newest checkpoint with these settings"
        told = "\n    ".join([head, *lines[:MOST_SHOWN], *more])
        raise UserError(f"{told}\nGive another {another}{change if newest is not None else ''}.")


def differing_settings(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """The names of the settings that say what is trained and are not the same."""
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    return [name for name in names if not _may_change(name)]


def concerns_optimizer(name: str) -> bool:
    """Whether a setting is of an optimizer: its class, or its learning rate."""
    return "optimizer" in name or name.endswith("learning_rate")


def lasting(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings that say what is trained."""
    return {name: text for name, text in settings.items() if not _may_change(name)}


def _difference(name: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    return f"{name}: {theirs.get(name, 'the default')} there, {ours.get(name, 'the default')} here"


def _may_change(name: str) -> bool:
    setting = name.rpartition("/")[2]
    return setting in MAY_CHANGE or setting.startswith(MAY_CHANGE_BELOW)
