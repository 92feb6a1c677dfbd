"""One lifecycle event as the line that events.jsonl holds of it.

Invariant: every line has the keys time (ISO 8601, UTC, milliseconds), level, event, worker, step and details. Used by
`events.py` for a run's own events, and by the supervisor of `tfdist.launch` for what happens between its starts.
"""

from __future__ import annotations

import datetime

from tfdist.telemetry.facts import Event
from tfdist.telemetry.json_text import to_json


def event_line(event: Event) -> str:
    """The line."""
    message = {} if event.message is None else {"message": event.message}
    return to_json(
        {
            "time": time_text(event.time),
            "level": event.level,
            "event": event.name,
            "worker": event.worker,
            "step": None if event.step is None else int(event.step),
            "details": message | dict(event.details),
        }
    )


def time_text(time: datetime.datetime) -> str:
    """A moment of UTC as ISO 8601 with milliseconds."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
