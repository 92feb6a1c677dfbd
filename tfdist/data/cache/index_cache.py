"""Keeps what was learned by scanning a file, so that the next run on this machine need not scan it again.

Invariant: an entry is found only for the same path, size and time of change; a cache that cannot be written or read
costs time, never a run. Entries lie in `$XDG_CACHE_HOME/tfdist/index`, by default `~/.cache/tfdist/index`.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist.data.formats.byte_ranges import FileVersion
from tfdist.storage import files
from tfdist.strategies.cluster import environment

Arrays = dict[str, np.ndarray]


def cached(file: FileVersion, settings: str, make: Callable[[], Arrays]) -> Arrays:
    """What `make` gave for this file and these settings, now or in an earlier run.

    Args:
      file: the file that is scanned.
      settings: all else that the result depends on, with a version of the format in it.
      make: scans the file; its arrays hold no Python objects.
    """
    path = file.path if files.is_remote(file.path) else os.path.abspath(file.path)
    identity = "\n".join([path, str(file.num_bytes), str(file.changed_nanoseconds), settings])
    entry = os.path.join(_directory(), f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz")
    try:
        with np.load(entry, allow_pickle=False) as held:
            return dict(held)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        pass  # not there, or torn
    arrays: dict[str, Any] = make()
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    try:
        files.make_dirs(os.path.dirname(entry))
        files.write_atomic(entry, packed.getvalue())
    except OSError:
        pass  # a read-only home: scanned again next time
    return arrays


def _directory() -> str:
    return os.path.join(environment.cache_directory(), "index")
