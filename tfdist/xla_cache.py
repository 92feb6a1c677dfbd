"""Keeps what XLA has compiled in the run directory, so that a run which resumes again and again compiles it once.

TensorFlow finds it by the names of functions, which count what the process has made before: a start that begins and one
that resumes find nothing of each other.

Invariant: holds no TensorFlow, which reads its flags once, when it is imported. What was compiled for a processor may
use instructions that another one lacks, so each kind has a place of its own. TensorFlow runs what it finds there
unchecked, so it is looked for only where nobody but this user can have written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import platform
import shutil
import stat
from collections.abc import MutableMapping

from tfdist.errors import TfdistError

FLAGS = "TF_XLA_FLAGS"
FLAG = "--tf_xla_persistent_cache_directory"
NAME = "xla_cache"
# In what TensorFlow says of entries that are damaged, or shorter than they were.
_UNREADABLE = ("serialized", "read less bytes than requested", "as binary proto")
_removed: set[str] = set()
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


class UnreadableCacheError(TfdistError):
    """XLA could not read what it had kept."""


def keep_compiled(run_dir: str, environment: MutableMapping[str, str]) -> None:
    """Has a TensorFlow that is imported from here on keep what XLA compiles below `run_dir`, unless that is remote.

    A directory that the user names in TF_XLA_FLAGS stays.

    Raises:
      PermissionError: the directory in `run_dir` is another user's, or a link.
    """
    flags, place = environment.get(FLAGS, ""), os.path.join(os.path.abspath(run_dir), NAME, _kind_of_processor())
    if "://" not in run_dir and FLAG not in flags and not any(map(str.isspace, place)):
        if os.path.isdir(run_dir):
            _make_private(os.path.join(run_dir, NAME))
        environment[FLAGS] = f"{flags} {FLAG}={place}".strip()


def _make_private(cache: str) -> None:
    """Makes the directory for this user alone, without what others may have written there.

    Where the parent has the sticky bit, nobody else can put another one in its place afterwards.
    """
    if os.path.lexists(cache):
        found = os.lstat(cache)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            if found.st_mode & 0o022:
                shutil.rmtree(cache, ignore_errors=True)  # another worker may be doing so
            else:
                os.chmod(cache, 0o700)
    with contextlib.suppress(FileExistsError):
        os.mkdir(cache, mode=0o700)
    found = os.lstat(cache)
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{cache} is not used: it is no directory, or a link to one")
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{cache} is not used: it has to be this user's, with mode 0700")


def remove_unreadable(error: BaseException, run_dir: str) -> bool:
    """Whether an error is XLA's, of something kept that it could not read; then what it kept is gone.

    Once in a process: what fails again has another cause.
    """
    cache = os.path.abspath(os.path.join(run_dir, NAME))
    is_tensorflows = type(error).__module__.startswith("tensorflow.")
    is_of_cache = any(word in str(error).lower() for word in _UNREADABLE)
    if not (is_tensorflows and is_of_cache and os.path.isdir(cache)) or cache in _removed or os.path.islink(cache):
        return False
    _removed.add(cache)
    shutil.rmtree(cache, ignore_errors=True)
    return True


def _kind_of_processor() -> str:
    features = platform.processor()
    if _CPU_INFO.exists():
        features = next((line for line in _CPU_INFO.read_text().splitlines() if line.startswith(("flags", "Feat"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
