"""A run directory belongs to one kind of run: a training or a sweep.

Invariant: whoever begins to write in a directory has asked here before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.result import TRAIN, TUNE, read_result
from tfdist.telemetry.run_directory import RunDirectory

WORDS = {TRAIN: "training", TUNE: "sweep"}


def check_kind(directory: RunDirectory, mode: str) -> Mapping[str, Any] | None:
    """The result of the run that the directory holds; None where it has none yet.

    Raises:
      UserError: the directory holds a run of another kind, or its result.json is no result.
    """
    result = read_result(directory)
    found, name = (result["mode"], directory.result) if result is not None else _kind_of_unfinished(directory)
    if found not in (None, mode):
        raise UserError(
            f"{directory.path} holds a {WORDS[found]} ({name.rpartition('/')[2]}), and this is a {WORDS[mode]}: a run "
            "directory belongs to one run. Give another --run_dir."
        )
    return result


def _kind_of_unfinished(directory: RunDirectory) -> tuple[str | None, str]:
    """Of which kind an unfinished run is, and the file that shows it."""
    for kind, path in ((TUNE, directory.sweep), (TRAIN, directory.starts), (TRAIN, directory.metrics)):
        if files.exists(path):
            return kind, path
    return None, ""
