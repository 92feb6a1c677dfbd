"""The checkpoints in a directory: listed by name and manifest, verified, removed, and which of them expire.

Invariant: a name bears the step and an attempt's own random part, so that no attempt writes where another did. The
manifest goes first when a checkpoint is removed, so that half of one does not exist; a directory without one is a
leftover. The newest that verified never expires.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.format.manifest import DamagedCheckpoint, Manifest
from tfdist.checkpoint.format.tensor_files import read_files
from tfdist.errors import UserError
from tfdist.storage import files

if TYPE_CHECKING:
    from tfdist.checkpoint.policy import CheckpointPolicy

_NAME = re.compile(r"step-(\d+)-[0-9a-z]+")
KEEP_LAST = 2  # where neither the policy nor a BackupAndRestore says how many
NO_MANIFEST = f"no {manifests.NAME}: it was never finished"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checkpoint's directory: its manifest, or the `problem` with it (a missing manifest is one)."""

    step: int
    path: str
    manifest: Manifest | None
    problem: str | None = None
    is_newer: bool = False  # than this tfdist reads

    @property
    def is_leftover(self) -> bool:
        """Whether the checkpoint has no manifest: half-written, half-removed, or being written just now."""
        return self.problem == NO_MANIFEST

    def check_format(self) -> None:
        """Raises UserError if a newer tfdist wrote the checkpoint."""
        if self.is_newer:
            raise UserError(f"{self.path}: {self.problem}")

    @property
    def age_order(self) -> tuple[int, str]:
        """Sorts by step; of several of one step, by when they were made."""
        return self.step, self.manifest.created if self.manifest else ""


def list_paths(directory: str) -> list[tuple[int, str]]:
    """Step and path of every directory of a checkpoint, finished or not, sorted. Reads none of them."""
    names = [(_NAME.fullmatch(name), name) for name in files.list_names(directory)]
    return sorted((int(found[1]), files.join(directory, name)) for found, name in names if found)


def list_checkpoints(directory: str) -> list[Entry]:
    """Every checkpoint of `RunDirectory.checkpoints`, oldest first, half-written ones too. Reads manifests only."""
    return sorted((read_entry(path) for _, path in list_paths(directory)), key=lambda entry: entry.age_order)


def read_newest_first(directory: str) -> Iterator[Entry]:
    """Yields every checkpoint, newest first, half-written ones too; reads a manifest when its turn comes."""
    for _, same_step in itertools.groupby(reversed(list_paths(directory)), key=lambda pair: pair[0]):
        entries = [read_entry(path) for _, path in same_step]
        yield from sorted(entries, key=lambda entry: entry.age_order, reverse=True)


def read_entry(path: str) -> Entry:
    """A checkpoint with its manifest. Raises UserError for a name that none has, OSError when the store fails."""
    step = step_of(path)
    try:
        manifest = manifests.decode(files.read(files.join(path, manifests.NAME)))
        if manifest.step != step:
            raise DamagedCheckpoint(f"{manifests.NAME} is of step {manifest.step:,}")
    except (FileNotFoundError, NotADirectoryError):
        return Entry(step, path, None, NO_MANIFEST)
    except DamagedCheckpoint as error:
        return Entry(step, path, None, str(error))
    except UserError as error:
        return Entry(step, path, None, str(error), is_newer=True)
    return Entry(step, path, manifest)


def step_of(path: str) -> int:
    """The step in the name of a checkpoint's directory; raises UserError for any other name."""
    found = _NAME.fullmatch(path.rstrip("/").rpartition("/")[2])
    if found is None:
        raise UserError(f"{path} is not a checkpoint: its name must look like step-000000001200-0123456789ab.")
    return int(found[1])


def verify(entry: Entry) -> str | None:
    """Returns what is wrong with a checkpoint, with the file's name; None when every byte is as it was written.

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


def find_expired(entries: Iterable[Entry], policy: CheckpointPolicy, *, newest: Entry) -> list[Entry]:
    """Returns those of `entries` that the policy does not keep.

    Args:
      entries: of one directory; leftovers are not judged, nor what a newer tfdist wrote.
      policy: what to keep.
      newest: the newest that is known to verify. What has its step or a later one goes: it is damaged, or belongs to
        a future that was abandoned when training went back. What has a damaged manifest goes, too.
    """
    known = [entry for entry in entries if not entry.is_leftover and not entry.is_newer]
    judged = [entry for entry in known if entry.path != newest.path]
    older = [entry for entry in judged if entry.manifest is not None and entry.step < newest.step]
    candidates = [newest, *sorted(older, key=lambda entry: entry.age_order, reverse=True)]
    kept = {entry.path for entry in candidates[: policy.keep_last or KEEP_LAST]}
    if policy.keep_every_steps:
        kept |= {entry.path for entry in candidates if entry.step % policy.keep_every_steps == 0}
    kept_for_value = find_best(candidates, policy)
    if kept_for_value is not None:
        kept.add(kept_for_value[1].path)
    return [entry for entry in judged if entry.path not in kept]


def find_best(entries: Iterable[Entry], policy: CheckpointPolicy) -> tuple[float, Entry] | None:
    """The best value of the policy's metric, and its checkpoint; of equal ones the first, as in result.json."""
    if policy.keep_best is None:
        return None
    scored: list[tuple[float, Entry]] = []
    for entry in sorted(entries, key=lambda entry: entry.age_order):
        value = entry.manifest.metrics.get(policy.keep_best, math.nan) if entry.manifest else math.nan
        if not math.isnan(value):
            scored.append((value, entry))
    choose = max if policy.larger_is_better else min
    return choose(scored, key=lambda pair: pair[0], default=None)
