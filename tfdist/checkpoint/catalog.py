"""Lists, verifies and removes the checkpoints of a run directory.

Invariant: the manifest goes first when a checkpoint is removed, so that half of one does not exist; a directory without
one is a leftover. The manager and `python -m tfdist.checkpoint` use this.
"""

from __future__ import annotations

from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.format.entries import Entry, list_checkpoints, list_paths
from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.checkpoint.format.stored_files import read_files
from tfdist.storage import files

__all__ = ["Entry", "list_checkpoints", "remove", "remove_all", "verify"]


def verify(entry: Entry) -> str | None:
    """What is wrong with a checkpoint, naming the file; None when every byte is as it was written.

    Raises OSError when the store does not answer.
    """
    if entry.manifest is None:
        return entry.problem
    try:
        read_files(entry.path, entry.manifest)
    except DamagedCheckpoint as error:
        return str(error)
    return None


def remove_all(directory: str) -> None:
    """Removes every checkpoint in a directory, and what is left of others."""
    for _, path in list_paths(directory):
        remove(path)


def remove(path: str) -> None:
    """Removes one checkpoint, or what is left of one."""
    files.remove_tree(path, first=manifests.NAME)
