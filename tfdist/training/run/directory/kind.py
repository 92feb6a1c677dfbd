"""A run directory belongs to one kind of run: a training or a sweep.

Invariant: whoever begins to write in a directory has asked here before.
"""

from __future__ import annotations

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.result import TRAIN, TUNE, read_mode
from tfdist.telemetry.run_directory import RunDirectory

WORDS = {TRAIN: "training", TUNE: "sweep"}


def check_kind(directory: RunDirectory, mode: str) -> None:
    """Raises UserError where the directory holds a run of another kind, or its result.json is damaged."""
    finished = read_mode(directory)
    found, name = (finished, directory.result) if finished is not None else _kind_of_unfinished(directory)
    if found not in (None, mode):
        raise UserError(
            f"{directory.path} holds a {WORDS.get(found, found)} ({name.rpartition('/')[2]}), and this is a "
            f"{WORDS[mode]}: a run directory belongs to one run. Give another --run_dir."
        )


def _kind_of_unfinished(directory: RunDirectory) -> tuple[str | None, str]:
    """Of which kind an unfinished run is, and the file that shows it."""
    for kind, path in ((TUNE, directory.sweep), (TRAIN, directory.starts), (TRAIN, directory.metrics)):
        if files.exists(path):
            return kind, path
    return None, ""
