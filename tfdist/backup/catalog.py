"""Lists, verifies and prunes the backups of a run directory.

Invariant: the manifest goes first when a backup is removed, so that half of one does not exist; a directory without
one is a leftover. The keeper and `python -m tfdist.backup` use this.
"""

from __future__ import annotations

from tfdist.backup import manifest as manifests
from tfdist.backup import retention
from tfdist.backup.entries import Entry, list_backups
from tfdist.backup.manifest import DamagedBackup
from tfdist.backup.policy import BackupPolicy
from tfdist.backup.stored_files import read_files
from tfdist.storage import files

__all__ = ["Entry", "list_backups", "newest_verified", "prune", "remove", "remove_leftovers", "verify"]


def verify(entry: Entry) -> str | None:
    """What is wrong with a backup, naming the file; None when every byte is as it was written.

    Raises OSError when the store does not answer.
    """
    if entry.manifest is None:
        return entry.problem
    try:
        read_files(entry.path, entry.manifest)
    except DamagedBackup as error:
        return str(error)
    return None


def newest_verified(entries: list[Entry]) -> Entry | None:
    """The newest of `entries` whose every byte is right."""
    ordered = sorted(entries, key=lambda entry: entry.age_order, reverse=True)
    return next((entry for entry in ordered if verify(entry) is None), None)


def prune(directory: str, policy: BackupPolicy) -> list[Entry]:
    """Removes what the policy does not keep, damaged backups among it, and gives it back.

    The newest backup that verifies stays, and nothing goes when there is none. Leftovers stay: one may be a backup
    that is being written.
    """
    entries = [entry for entry in list_backups(directory) if not entry.is_leftover]
    newest = newest_verified(entries)
    if newest is None:
        return []
    doomed = retention.doomed(entries, policy, newest=newest)
    for entry in doomed:
        remove(entry.path)
    return doomed


def remove(path: str) -> None:
    """Removes one backup, or what is left of one."""
    files.remove(files.join(path, manifests.NAME))
    files.remove_tree(path)


def remove_leftovers(directory: str) -> list[str]:
    """Removes directories without a manifest, which a crash left, and gives back their paths.

    Only for the owner of the run directory, and not while it writes: what is being written has no manifest either.
    """
    paths = [entry.path for entry in list_backups(directory) if entry.is_leftover]
    for path in paths:
        remove(path)
    return paths
