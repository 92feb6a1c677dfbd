"""What a run is known by to trackers and monitoring systems: the same for all its workers and starts.

Invariant: the chief alone makes it, and keeps it in RUN_DIR/telemetry/run_id; an emptied directory gets a new one, and
so does a copy of a run that is still where it was copied from.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets

from tfdist.errors import TfdistError
from tfdist.storage import files
from tfdist.strategies.base import Strategy
from tfdist.telemetry.records import Warn
from tfdist.telemetry.run_directory import RunDirectory

NUM_BYTES = 16  # all random, since samplers of traces decide by any of their bits


def run_id_of(directory: RunDirectory, strategy: Strategy, *, keeps: bool, warn: Warn) -> str:
    """The run's 32 hexadecimal digits, on every worker. A collective.

    Args:
      directory: of the run.
      strategy: connected.
      keeps: whether it is found, or left, in the directory.
      warn: takes what is wrong with the file.
    """

    def read() -> str:
        return _kept(directory, warn) if keeps else secrets.token_hex(NUM_BYTES)

    return strategy.read_on_chief(read, f"{directory.path} cannot be used")


def drop_copied_id(directory: RunDirectory, last: str | None) -> str | None:
    """Removes the ID of a copy, whose next start makes its own; the original's path, None where there is none.

    A run that was moved keeps its ID. So does a copy between a disk and a bucket: its original may be out of reach.

    Args:
      directory: of the run.
      last: where the run's last start was, as run.json says.
    """
    if last is None or files.is_remote(last) != files.is_remote(directory.path):
        return None
    with contextlib.suppress(OSError, TfdistError):  # of an original that is not there any more, or is out of reach
        is_here = last == directory.path if files.is_remote(last) else os.path.samefile(last, directory.path)
        if not is_here and files.read(RunDirectory(last).run_id) == files.read(directory.run_id):
            files.remove(directory.run_id)
            return last
    return None


def _kept(directory: RunDirectory, warn: Warn) -> str:
    if files.exists(directory.run_id):
        text = files.read(directory.run_id).decode(errors="replace").strip()
        if re.fullmatch("[0-9a-f]{32}", text):
            return text
        warn(f"{directory.run_id} is damaged: trackers and monitoring take what follows for another run.")
    made = secrets.token_hex(NUM_BYTES)
    files.make_dirs(directory.telemetry)
    files.write_atomic(directory.run_id, f"{made}\n")
    return made
