"""One lifecycle event as the line that events.jsonl holds of it.

Invariant: every line has the keys time (ISO 8601, UTC, milliseconds), level, event, worker, step and details. Used by
`events.py` for a run's own events, and by the supervisor of `tfdist.launch` for what happens between its starts.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from tfdist.telemetry.json_text import to_json


def event_line(*, level: str, event: str, worker: int | None, step: int | None, details: Mapping[str, object]) -> str:
    """The line, of this moment; `worker` is None for what no single worker did."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return to_json(
        {
            "time": now,
            "level": level,
            "event": event,
            "worker": worker,
            "step": None if step is None else int(step),
            "details": dict(details),
        }
    )
