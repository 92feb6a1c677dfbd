"""run.json: of which kind and of what settings a run is, and from where each of its starts continued.

Invariant: written by the chief alone, once a start, when that has put in place what it resumes from.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from tfdist.storage import files
from tfdist.strategies.base import Strategy
from tfdist.telemetry.facts import now
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import DamagedFileError, Warn, load_record, read_record
from tfdist.telemetry.result import Start, Starts
from tfdist.telemetry.run_directory import RunDirectory


def read_starts(directory: RunDirectory, warn: Warn) -> Starts:
    """What earlier starts left; nothing where there was none, or the file is damaged."""
    return read_record(directory.starts, Starts, warn) or Starts(settings={}, starts=())


def find_checkpoint_dir(path: str) -> str | None:
    """Where the last start of the run in `path` kept its checkpoints, where that is not in `path` itself."""
    try:
        found = load_record(RunDirectory(path).starts, Starts)
    except DamagedFileError:  # of which whoever takes the directory warns
        return None
    return None if found is None else found.checkpoint_dir


def note_start(
    directory: RunDirectory, settings: Mapping[str, str], earlier: Sequence[Start], *, step: int, lost_steps: int
) -> None:
    """Adds a start to the `earlier` ones."""
    starts = [*earlier, Start(now(), step, lost_steps)]
    content = Starts(settings=dict(settings), starts=starts, checkpoint_dir=directory.checkpoint_dir)
    files.write_atomic(directory.starts, to_json(content, indent=2) + "\n")


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
