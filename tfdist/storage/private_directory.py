"""Directories of this user alone in places that others may share.

Invariant: a directory that passes is a directory and no link, belongs to this user, and nobody else may read it, write
to it or list it. Where the parent has the sticky bit, nobody else can put another one in its place. XLA's cache lives
in one.
"""

from __future__ import annotations

import contextlib
import os
import stat


def make(path: str) -> None:
    """Makes the directory, unless it is there already; raises PermissionError where `problem` finds one."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, mode=0o700)
    if (why := problem(path)) is not None:
        raise PermissionError(f"{path} is not used: {why}")


def problem(path: str) -> str | None:
    """Why a path is no private directory of this user; None where it is one. Raises OSError where it is nothing."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        return "it is no directory, or a link to one"
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}, not to {os.getuid()}, who runs this"
    if found.st_mode & 0o077:
        return f"others may use it (mode {stat.S_IMODE(found.st_mode):04o}); it has to have mode 0700"
    return None
