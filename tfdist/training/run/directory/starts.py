"""run.json: of which kind and of what settings a run is, and from where each of its starts continued.

Invariant: written by the chief alone, once a start, when that has put in place what it resumes from.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

from tfdist.storage import files
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.result import TRAIN
from tfdist.telemetry.run_directory import RunDirectory


def read_starts(directory: RunDirectory) -> list[dict[str, Any]]:
    """The starts of the run so far, the first one first: `time` (ISO 8601, UTC), `step`, `lost_steps`."""
    return list(_read(directory).get("starts", []))


def read_settings(directory: RunDirectory) -> Mapping[str, str]:
    """The settings of the last start, by name; empty where nothing was ever started."""
    return _read(directory).get("settings", {})


def find_checkpoint_dir(path: str) -> str | None:
    """Where the last start of the run in `path` kept its checkpoints, where that is not in `path` itself."""
    found = _read(RunDirectory(path)).get("checkpoint_dir")
    return found if isinstance(found, str) and found else None


def note_start(directory: RunDirectory, settings: Mapping[str, str], *, step: int, lost_steps: int) -> None:
    """Adds a start.

    Args:
      directory: of the run.
      settings: of this start.
      step: where it resumes; 0 where it begins.
      lost_steps: at least so many had been done after that step by starts before, and are done again.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    starts = [*read_starts(directory), {"time": now, "step": step, "lost_steps": lost_steps}]
    content = {"mode": TRAIN, "settings": dict(settings), "starts": starts}
    if directory.checkpoint_dir is not None:
        content["checkpoint_dir"] = directory.checkpoint_dir
    files.write_atomic(directory.starts, to_json(content, indent=2) + "\n")


def _read(directory: RunDirectory) -> dict[str, Any]:
    """What the file holds; nothing where there is none, or somebody else has written there."""
    if not files.exists(directory.starts):
        return {}
    try:
        content = json.loads(files.read(directory.starts))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
