"""Writes one checkpoint: data files first, the manifest last; or one worker's part of it.

Invariant: until the manifest is stored the checkpoint does not exist; what fails before leaves nothing that a later
attempt would meet. The manager's thread calls this, with a snapshot that nobody changes meanwhile.

Where several workers write, each writes its own tensors. Its part is done when its note lies beside the data files:
which they are, or why there are none. The chief stores the manifest once all are there, and waits for a while only.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist.checkpoint.catalog import Entry
from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.format.manifest import Manifest, StoredFile
from tfdist.checkpoint.write.snapshot import HostBuffer
from tfdist.storage import files
from tfdist.storage.contents import crc32c
from tfdist.telemetry.json_text import from_json

PATIENCE_SECONDS = 300.0  # with a worker whose part is not there though the chief has written its own
NOTES_AT_ONCE = 16  # read from the store
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.5


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of each checkpoint that one worker writes.

    Attributes:
      index: of the worker; 0 is the chief.
      count: of workers.
      start: letters and digits that all workers of this start of the run have, and no other start.
    """

    index: int
    count: int
    start: str

    @property
    def is_chiefs(self) -> bool:
        """Whether this is the part of the chief, who commits."""
        return self.index == 0

    def path(self, directory: str, step: int, number: int) -> str:
        """The path of the checkpoint that is the start's `number`th, the same on every worker."""
        return files.join(directory, f"step-{step:012d}-{self.start}{number:04x}")

    @property
    def prefix(self) -> str:
        """The beginning of its data files' names."""
        return f"part-{self.index:05d}-" if self.count > 1 else ""

    def note(self, path: str, content: dict[str, Any]) -> None:
        """Writes the note which files this worker has written, or the "error" for which they will not come."""
        files.write_atomic(files.join(path, _note_name(self.index)), json.dumps(content))

    def collect_notes(self, path: str, gives_up: Callable[[], bool]) -> list[dict[str, Any]]:
        """Waits for the other workers' notes; returns them in order. Lists once a round, as a bucket answers slowly.

        Args:
          path: of the checkpoint.
          gives_up: asked meanwhile, whether nobody needs it any more.

        Raises:
          OSError: a worker could not write its part, or it did not come.
        """
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE_SECONDS
        missing = {_note_name(index): index for index in range(1, self.count)}
        told: dict[int, dict[str, Any]] = {}

        def read(name: str) -> dict[str, Any]:
            return from_json(files.read(files.join(path, name)))

        with ThreadPoolExecutor(NOTES_AT_ONCE, "tfdist-notes") as threads:
            while missing:
                there = [name for name in files.list_names(path) if name in missing]
                for name, note in zip(there, threads.map(read, there), strict=True):
                    index = missing.pop(name)
                    if "error" in note:
                        raise OSError(f"worker {index} could not write its part: {note['error']}")
                    told[index] = note
                if missing and (gives_up() or time.monotonic() > deadline):
                    raise OSError(f"worker {min(missing.values())} did not write its part")
                if missing and not there:
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return [told[index] for index in sorted(told)]


def _note_name(worker: int) -> str:
    return f"part-{worker:05d}.json"


_MOST_UPLOADS = 4


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A copy of what `save` was called with."""

    step: int
    buffer: HostBuffer
    values: Mapping[str, Any]
    metrics: Mapping[str, float]


def write_checkpoint(
    path: str,
    snapshot: Snapshot,
    *,
    identity: Mapping[str, Any],
    still_ours: Callable[[], None],
    part: Part,
    gives_up: Callable[[], bool] = lambda: False,
) -> Entry | None:
    """Writes and commits a snapshot at `path`, from `Part.path`; None where the chief commits.

    Raises:
      OSError: the store refused. What was written of it may still be there, without a manifest.
      Whatever `still_ours` raises.
    """
    files.make_dirs(path)
    stored = _write_files(path, snapshot.buffer, part.prefix)
    note = {
        "files": [dataclasses.asdict(file) for file in stored],
        "num_tensors": sum(len(file.offsets) for file in snapshot.buffer.files),
        "num_tensor_bytes": sum(file.num_bytes for file in snapshot.buffer.files),
    }
    if not part.is_chiefs:
        part.note(path, note)
        return None
    notes = [note, *part.collect_notes(path, gives_up)]
    manifest = Manifest(
        step=snapshot.step,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        identity=identity,
        metrics=snapshot.metrics,
        values=snapshot.values,
        files=tuple(StoredFile(**file) for each in notes for file in each["files"]),
        num_tensors=sum(each["num_tensors"] for each in notes),
        num_tensor_bytes=sum(each["num_tensor_bytes"] for each in notes),
    )
    text = manifests.encode(manifest)
    still_ours()
    files.write_new(files.join(path, manifests.NAME), [text], crc32c=crc32c(text))
    return Entry(snapshot.step, path, manifest)


def _write_files(path: str, buffer: HostBuffer, prefix: str) -> tuple[StoredFile, ...]:
    """Writes a buffer's files, several at once to a bucket, as its streams are slow; returns sizes and checksums."""
    most = _MOST_UPLOADS if files.is_remote(path) else 1
    with ThreadPoolExecutor(max(1, min(most, len(buffer.files))), "tfdist-upload") as threads:
        indices = range(len(buffer.files))
        return tuple(threads.map(lambda index: _write_file(path, buffer, index, prefix), indices))


def _write_file(path: str, buffer: HostBuffer, index: int, prefix: str) -> StoredFile:
    parts = buffer.parts(index)
    checksum = crc32c(*parts)
    name = f"{prefix}data-{index + 1:05d}-of-{len(buffer.files):05d}.safetensors"
    num_bytes = files.write_new(files.join(path, name), parts, crc32c=checksum)
    return StoredFile(name, num_bytes, checksum)
