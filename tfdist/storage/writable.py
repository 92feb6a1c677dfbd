"""Finds out before any training whether a run directory can be written.

Invariant: after `check_writable` returned, the directory existed and took a file; otherwise the user has one message
with the reason and the cure. `RunDirectory.create` calls it.
"""

from __future__ import annotations

import errno
import os
import uuid

from tfdist.errors import UserError
from tfdist.storage import files

_LOCAL_ADVICE = {
    errno.EACCES: "Give this user write permission there, or choose another run directory.",
    errno.EPERM: "Give this user write permission there, or choose another run directory.",
    errno.EROFS: "Choose a run directory on a file system that can be written.",
    errno.ENOSPC: "Make room on that disk, or choose a run directory on another one.",
    errno.EDQUOT: "Make room within the quota, or choose a run directory elsewhere.",
}
_BUCKET_ADVICE = {
    errno.ENOENT: "Create the bucket, or correct its name.",
    errno.EACCES: "Give this account the role 'Storage Object Admin' on the bucket; credentials come from "
    "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login` or the machine's service account.",
}
_BUCKET_UNREACHABLE = "Check the network and proxy settings, or choose a local run directory."


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
        explain = _explain_bucket if files.is_remote(path) else _explain_local
        raise UserError(f"The run directory {path!r} cannot be written: {explain(path, error)}") from error


def _explain_bucket(path: str, error: OSError) -> str:
    del path
    reason = " ".join((error.strerror or str(error)).split())
    return f"{reason}. {_BUCKET_ADVICE.get(error.errno, _BUCKET_UNREACHABLE)}"


def _explain_local(path: str, error: OSError) -> str:
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{_file_in_the_way(path)!r} is a file. Choose another run directory, or move that file away."
    place = _nearest_directory(path)
    advice = _LOCAL_ADVICE.get(error.errno, "Choose another run directory.")
    return f"{error.strerror or error} (in {place!r}). {advice}"


def _file_in_the_way(path: str) -> str:
    ancestor = os.path.abspath(path)
    while not os.path.lexists(ancestor):
        ancestor = os.path.dirname(ancestor)
    return ancestor


def _nearest_directory(path: str) -> str:
    ancestor = os.path.abspath(path)
    while not os.path.isdir(ancestor):
        ancestor = os.path.dirname(ancestor)
    return ancestor
