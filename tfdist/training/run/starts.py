"""run.json: of which kind and of what settings a run is, where each of its starts resumed and how it ended.

Invariant: written by the chief alone, twice a start: when that has put in place what it resumes from, and when it has
saved and ends as planned. A start without an end has failed, or still runs.
"""

from __future__ import annotations

import dataclasses
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


def note_end(directory: RunDirectory, end: str, warn: Warn) -> None:
    """Adds to the last start how it ended; a warning where that cannot be written, which is no reason to fail."""
    record = read_starts(directory, warn)
    if not record.starts:
        return
    *earlier, last = record.starts
    content = dataclasses.replace(record, starts=[*earlier, dataclasses.replace(last, end=end)])
    try:
        files.write_atomic(directory.starts, to_json(content, indent=2) + "\n")
    except OSError as error:
        warn(f"{directory.starts} could not be written, so that this start counts as a failure: {error}")
