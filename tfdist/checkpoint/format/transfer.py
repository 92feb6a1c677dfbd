"""Copies a checkpoint to another directory, local or in a bucket.

Invariant: a copy is what its source's manifest says, bit for bit, and its own manifest is stored last: interrupted at
any moment, it does not exist, and copying again completes it. `python -m tfdist.checkpoint copy` calls this.
"""

from __future__ import annotations

import posixpath

from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.format.checksum import crc32c
from tfdist.checkpoint.format.entries import Entry
from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.errors import UserError
from tfdist.storage import files


def copy(entry: Entry, directory: str) -> str:
    """Copies a checkpoint into `directory` under its own name, and gives back its path there.

    Raises:
      DamagedCheckpoint: the source is damaged; the message names the file. The copy has no manifest then.
      UserError: something else stands where the copy should go.
      OSError: one of the stores failed.
    """
    if entry.manifest is None:
        raise DamagedCheckpoint(f"{entry.problem} ({entry.path})")
    destination = files.join(directory, posixpath.basename(entry.path.rstrip("/")))
    files.make_dirs(destination)
    for file in entry.manifest.files:
        source = files.join(entry.path, file.name)
        try:
            content = files.read(source)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{source}: it is missing") from error
        checksum = crc32c(content)
        if (len(content), checksum) != (file.num_bytes, file.crc32c):
            raise DamagedCheckpoint(
                f"{source}: it has {len(content):,} bytes with the checksum {checksum:08x} instead of "
                f"{file.num_bytes:,} with {file.crc32c:08x}"
            )
        _put(files.join(destination, file.name), content, checksum)
    text = manifests.encode(entry.manifest)
    _put(files.join(destination, manifests.NAME), text, crc32c(text))
    return destination


def _put(path: str, content: bytes, checksum: int) -> None:
    """Creates a file, unless an earlier copy did."""
    try:
        files.write_new(path, [content], crc32c=checksum)
    except FileExistsError as error:
        if files.read(path) != content:
            raise UserError(
                f"{path} exists and is not what would be copied there. Copy to another directory, or remove "
                f"{posixpath.dirname(path)}."
            ) from error
