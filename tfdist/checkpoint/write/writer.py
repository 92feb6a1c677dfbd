"""Writes one checkpoint: data files first, the manifest last.

Invariant: until the manifest is stored the checkpoint does not exist; what fails before leaves nothing that a later
attempt would meet. The manager's thread calls this, with a snapshot that nobody changes meanwhile.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist.checkpoint.catalog import Entry
from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.format.manifest import Manifest, StoredFile
from tfdist.checkpoint.write.parts import Part
from tfdist.checkpoint.write.snapshot import HostBuffer
from tfdist.storage import files
from tfdist.storage.contents import crc32c

_MOST_UPLOADS = 4


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What `save` was given, copied."""

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
    part: Part | None = None,
    gives_up: Callable[[], bool] = lambda: False,
) -> Entry | None:
    """Writes and commits a snapshot at `path`, from `catalog.new_path` or `Part.path`; None where the chief commits.

    Raises:
      OSError: the store refused. What was written of it may still be there, without a manifest.
      Whatever `still_ours` raises.
    """
    files.make_dirs(path)
    stored = _write_files(path, snapshot.buffer, "" if part is None else part.prefix)
    num_tensors, num_tensor_bytes = snapshot.buffer.num_tensors, snapshot.buffer.num_bytes
    if part is not None and not part.is_chiefs:
        part.note(path, stored, num_tensors=num_tensors, num_tensor_bytes=num_tensor_bytes)
        return None
    if part is not None:
        others, more_tensors, more_bytes = part.collect_others(path, gives_up)
        stored += others
        num_tensors, num_tensor_bytes = num_tensors + more_tensors, num_tensor_bytes + more_bytes
    manifest = Manifest(
        step=snapshot.step,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        identity=identity,
        metrics=snapshot.metrics,
        values=snapshot.values,
        files=stored,
        num_tensors=num_tensors,
        num_tensor_bytes=num_tensor_bytes,
    )
    text = manifests.encode(manifest)
    still_ours()
    files.write_new(files.join(path, manifests.NAME), [text], crc32c=crc32c(text))
    return Entry(snapshot.step, path, manifest)


def _write_files(path: str, buffer: HostBuffer, prefix: str) -> tuple[StoredFile, ...]:
    """One after the other on a local disk, several at once to a bucket, whose streams are slow each."""
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
