"""Finds out before any training whether a run directory can be written.

Invariant: after `check_writable` returned, the directory existed and took a file; otherwise the user has one message
with the reason and the hint. `RunDirectory.create` calls it.
"""

from __future__ import annotations

import os
import uuid

from tfdist.errors import UserError
from tfdist.storage import files, troubles


def check_writable(run_dir: files.StrPath) -> None:
    """Makes the directory, writes and removes a small file; raises UserError when one of these fails."""
    path = os.fspath(run_dir)
    if not path:
        raise UserError("The run directory is empty. Received: ''. Write a local directory or gs://BUCKET/DIRECTORY.")
    probe = files.join(path, f".write-probe-{uuid.uuid4().hex[:12]}")
    try:
        files.exists(path)  # which a server that does not answer fails sooner than a put
        files.make_dirs(path)
        files.write_atomic(probe, b"")
        files.remove(probe)
    except OSError as error:
        is_remote = files.is_remote(path)
        why = troubles.explain_bucket(error) if is_remote else troubles.explain_local(path, error)
        raise UserError(f"The run directory {path!r} cannot be written: {why}") from error
