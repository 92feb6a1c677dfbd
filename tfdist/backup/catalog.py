"""Lists, verifies and prunes the backups of a run directory.

Invariant: the manifest goes first when a backup is removed, so that half of one does not exist; a directory without
one is a leftover. The keeper and `python -m tfdist.backup` use this.
"""

from __future__ import annotations

import dataclasses

from tfdist.backup.manifest import Manifest
from tfdist.backup.policy import BackupPolicy


@dataclasses.dataclass(frozen=True)
class Entry:
    """A backup's directory: its manifest, or the `problem` with it (a missing manifest is one)."""

    step: int
    path: str
    manifest: Manifest | None
    problem: str | None = None


def list_backups(directory: str) -> list[Entry]:
    """Every backup of `RunDirectory.backups`, oldest step first. Reads manifests only."""
    raise NotImplementedError


def verify(entry: Entry) -> str | None:
    """What is wrong with a backup, naming the file; None when every byte is as it was written."""
    raise NotImplementedError


def prune(directory: str, policy: BackupPolicy) -> list[Entry]:
    """Removes what the policy does not keep and gives it back."""
    raise NotImplementedError


def remove_leftovers(directory: str) -> list[str]:
    """Removes directories without a manifest, which a crash left; gives back their paths."""
    raise NotImplementedError
