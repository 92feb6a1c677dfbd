"""run.json: of which kind and of what settings a run is, and where each of its starts resumed.

Invariant: written by the chief alone, when a start has put in place what it resumes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdist.storage import files
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
