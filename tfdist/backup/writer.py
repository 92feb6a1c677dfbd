"""Writes one backup: data files first, the manifest last.

Invariant: until the manifest is stored the backup does not exist; what fails before leaves nothing that a later
attempt would meet. The keeper's thread calls this, with a snapshot that nobody changes meanwhile.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist.backup import manifest as manifests
from tfdist.backup import packing
from tfdist.backup.checksum import crc32c
from tfdist.backup.entries import Entry
from tfdist.backup.manifest import Manifest, StoredFile
from tfdist.backup.snapshot import HostBuffer
from tfdist.storage import files

_MOST_UPLOADS = 4


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What `save` was given, copied."""

    step: int
    buffer: HostBuffer
    values: Mapping[str, Any]
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Written:
    """A committed backup, and how long its data files took to be packed and stored."""

    entry: Entry
    data_seconds: float


def write_backup(
    path: str,
    snapshot: Snapshot,
    *,
    identity: Mapping[str, Any],
    pack_as: str,
    still_ours: Callable[[], None],
) -> Written:
    """Writes and commits a snapshot at `path`, from `entries.new_path`.

    Raises:
      OSError: the store refused. What was written of it may still be there, without a manifest.
      Whatever `still_ours` raises.
    """
    begun = time.perf_counter()
    files.make_dirs(path)
    stored = _write_files(path, snapshot.buffer, pack_as)
    data_seconds = time.perf_counter() - begun
    manifest = Manifest(
        step=snapshot.step,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        identity=identity,
        metrics=snapshot.metrics,
        values=snapshot.values,
        files=stored,
        num_tensors=snapshot.buffer.num_tensors,
        num_tensor_bytes=snapshot.buffer.num_bytes,
    )
    text = manifests.encode(manifest)
    still_ours()
    files.write_new(files.join(path, manifests.NAME), [text], crc32c=crc32c(text))
    return Written(Entry(snapshot.step, path, manifest), data_seconds)


def _write_files(path: str, buffer: HostBuffer, pack_as: str) -> tuple[StoredFile, ...]:
    """One after the other on a local disk, several at once to a bucket, whose streams are slow each."""
    indices = range(len(buffer.files))
    if not files.is_remote(path) or len(buffer.files) < 2:
        return tuple(_write_file(path, buffer, index, pack_as) for index in indices)
    with ThreadPoolExecutor(min(_MOST_UPLOADS, len(buffer.files)), "tfdist-upload") as threads:
        return tuple(threads.map(lambda index: _write_file(path, buffer, index, pack_as), indices))


def _write_file(path: str, buffer: HostBuffer, index: int, pack_as: str) -> StoredFile:
    parts = buffer.parts(index)
    if pack_as != packing.NONE:
        packed = packing.pack(parts, pack_as, item_bytes=buffer.files[index].item_bytes)
        parts = [memoryview(packed)]
    checksum = crc32c(*parts)
    name = f"data-{index + 1:05d}-of-{len(buffer.files):05d}.safetensors{packing.suffix(pack_as)}"
    num_bytes = files.write_new(files.join(path, name), parts, crc32c=checksum)
    return StoredFile(name, num_bytes, checksum, pack_as)
