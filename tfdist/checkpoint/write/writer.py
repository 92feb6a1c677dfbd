"""Writes one checkpoint: data files first, the manifest last.

Invariant: until the manifest is stored the checkpoint does not exist; what fails before leaves nothing that a later
attempt would meet. The manager's thread calls this, with a snapshot that nobody changes meanwhile.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.format import packing
from tfdist.checkpoint.format.checksum import crc32c
from tfdist.checkpoint.format.entries import Entry
from tfdist.checkpoint.format.manifest import Manifest, StoredFile
from tfdist.checkpoint.write.parts import Part
from tfdist.checkpoint.write.snapshot import HostBuffer
from tfdist.checkpoint.write.throttle import Throttle
from tfdist.storage import contents, files

_MOST_UPLOADS = 4
_PIECE_BYTES = 2**19  # the checksum holds Python's lock for a twentieth of a millisecond


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What `save` was given, copied."""

    step: int
    buffer: HostBuffer
    values: Mapping[str, Any]
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Written:
    """A committed checkpoint, and how long its data files took to be packed and stored."""

    entry: Entry
    data_seconds: float


def write_checkpoint(
    path: str,
    snapshot: Snapshot,
    *,
    identity: Mapping[str, Any],
    pack_as: str,
    still_ours: Callable[[], None],
    throttle: Throttle,
    part: Part | None = None,
    gives_up: Callable[[], bool] = lambda: False,
) -> Written | None:
    """Writes and commits a snapshot at `path`, from `entries.new_path` or `Part.path`; None where the chief commits.

    To a local disk each piece is checksummed and written while the processor's cache has it, with rests between as
    `throttle` says.

    Raises:
      OSError: the store refused. What was written of it may still be there, without a manifest.
      Whatever `still_ours` raises.
    """
    begun = time.perf_counter()
    throttle.begin(snapshot.buffer.num_bytes)
    files.make_dirs(path)
    stored = _write_files(path, snapshot.buffer, pack_as, throttle, "" if part is None else part.prefix)
    throttle.end(snapshot.buffer.num_bytes)
    data_seconds = time.perf_counter() - begun - throttle.rested_seconds
    num_tensors, num_tensor_bytes = snapshot.buffer.num_tensors, snapshot.buffer.num_bytes
    if part is not None and not part.is_chiefs:
        part.note(path, stored, num_tensors=num_tensors, num_tensor_bytes=num_tensor_bytes)
        return None
    if part is not None:
        others, more_tensors, more_bytes = part.others(path, gives_up)
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
    return Written(Entry(snapshot.step, path, manifest), data_seconds)


def _write_files(
    path: str, buffer: HostBuffer, pack_as: str, throttle: Throttle, prefix: str
) -> tuple[StoredFile, ...]:
    """One after the other on a local disk, several at once to a bucket, whose streams are slow each."""
    indices = range(len(buffer.files))
    if not files.is_remote(path):
        return tuple(_write_local(path, buffer, index, pack_as, throttle, prefix) for index in indices)
    with ThreadPoolExecutor(max(1, min(_MOST_UPLOADS, len(buffer.files))), "tfdist-upload") as threads:
        return tuple(threads.map(lambda index: _upload(path, buffer, index, pack_as, prefix), indices))


def _write_local(
    path: str, buffer: HostBuffer, index: int, pack_as: str, throttle: Throttle, prefix: str
) -> StoredFile:
    parts = _packed(buffer, index, pack_as, throttle.rest)
    checksum = 0

    def pieces() -> Iterator[memoryview]:
        nonlocal checksum
        for part in parts:
            for first in range(0, part.nbytes, _PIECE_BYTES):
                piece = part[first : first + _PIECE_BYTES]
                checksum = contents.crc32c(piece, seed=checksum)
                yield piece
                throttle.rest()

    name = prefix + _file_name(buffer, index, pack_as)
    num_bytes = files.write_new(files.join(path, name), pieces())
    return StoredFile(name, num_bytes, checksum, pack_as)


def _upload(path: str, buffer: HostBuffer, index: int, pack_as: str, prefix: str) -> StoredFile:
    parts = _packed(buffer, index, pack_as, lambda: None)
    checksum = crc32c(*parts)
    name = prefix + _file_name(buffer, index, pack_as)
    num_bytes = files.write_new(files.join(path, name), parts, crc32c=checksum)
    return StoredFile(name, num_bytes, checksum, pack_as)


def _packed(buffer: HostBuffer, index: int, pack_as: str, rest: Callable[[], None]) -> list[memoryview]:
    parts = buffer.parts(index)
    if pack_as == packing.NONE:
        return parts
    return [memoryview(packing.pack(parts, pack_as, item_bytes=buffer.files[index].item_bytes, rest=rest))]


def _file_name(buffer: HostBuffer, index: int, pack_as: str) -> str:
    return f"data-{index + 1:05d}-of-{len(buffer.files):05d}.safetensors{packing.suffix(pack_as)}"
