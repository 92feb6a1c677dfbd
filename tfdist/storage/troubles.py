"""Says in one message why a store could not do what a run asked of it, and what to do about it.

Invariant: an OSError of a store, or of a full or broken disk, is the user's to mend and never a bug. After
`check_writable` returned, which `RunDirectory.create` calls, the directory existed and took a file.
"""

from __future__ import annotations

import errno
import os
import traceback
import uuid
from collections.abc import Callable

from tfdist.errors import UserError
from tfdist.storage import files

_STORES = f"{os.path.dirname(os.path.abspath(__file__))}{os.sep}"
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
DISK_FAILURES = tuple(map(os.strerror, _OF_A_DISK))
_LOCAL_ADVICE = {
    errno.EACCES: "Give this user write permission there, or choose another run directory.",
    errno.EPERM: "Give this user write permission there, or choose another run directory.",
    errno.EROFS: "Choose a run directory on a file system that can be written.",
    errno.ENOSPC: "Make room on that disk, or choose a run directory on another one.",
    errno.EDQUOT: "Make room within the quota, or choose a run directory elsewhere.",
    errno.ELOOP: "tfdist does not write through a symbolic link: remove it, or choose another run directory.",
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
        raise UserError(f"The run directory {path!r} cannot be written: {_explain(path, error)}") from error


def is_disk_full(path: str) -> bool:
    """Whether the disk of a local path has no block left for this user."""
    if files.is_remote(path):
        return False
    try:
        return os.statvfs(path).f_bavail == 0
    except OSError:
        return False


def explain_failure(error: BaseException) -> UserError | None:
    """The UserError for an OSError that a store raised, or that a disk is the cause of; None for any other."""
    if not isinstance(error, OSError):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    if error.errno not in _OF_A_DISK and not any(frame.filename.startswith(_STORES) for frame in frames):
        return None
    path = error.filename if isinstance(error.filename, str) else ""
    return UserError(f"{path or 'A file'} cannot be used: {_explain(path, error)}")


def _explain(path: str, error: OSError) -> str:
    """Reason and hint for what a run asked of a path."""
    reason = " ".join((error.strerror or str(error)).split())
    if path and files.is_remote(path):
        return f"{reason}. {_BUCKET_ADVICE.get(error.errno or 0, _BUCKET_UNREACHABLE)}"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        file = _find_ancestor(path, os.path.lexists)
        return f"{file!r} is a file. Choose another run directory, or move that file away."
    advice = _LOCAL_ADVICE.get(error.errno or 0, "Choose another run directory.")
    place = f" (in {_find_ancestor(path, os.path.isdir)!r})" if path else ""
    return f"{reason}{place}. {advice}"


def _find_ancestor(path: str, accepts: Callable[[str], bool]) -> str:
    ancestor = os.path.abspath(path)
    while not accepts(ancestor):
        ancestor = os.path.dirname(ancestor)
    return ancestor
