"""What threads of the input pipeline have to say to the user, kept until the run has a moment to tell it.

Invariant: `give` may be called by any thread at any time and never waits for a console or a file; a run drains what was
given between calls of the step and at its end, in the order in which it was given. Without a run a notice is a line of
Python's log. Given by data sources, drained by `reporter.py` and by an open run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.telemetry.logs.events import EventLog

MOST_KEPT = 1000
_LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()
_KEPT: collections.deque[Notice] = collections.deque(maxlen=MOST_KEPT)
_LISTENERS: list[object] = []


@dataclasses.dataclass(frozen=True)
class Notice:
    """A warning: the event's name, a sentence, and details for events.jsonl."""

    event: str
    message: str
    details: Mapping[str, Any]


def give(event: str, message: str, **details: Any) -> None:
    """Warns the user, soon."""
    with _LOCK:
        if _LISTENERS:
            _KEPT.append(Notice(event, message, details))
            return
    _LOG.warning("%s", message)


@contextlib.contextmanager
def listening(events: EventLog) -> Iterator[None]:
    """Keeps what is given meanwhile; what nobody drained goes to `events` at the end."""
    with _LOCK:
        _LISTENERS.append(events)
    try:
        yield
    finally:
        drain(events)
        with _LOCK:
            _LISTENERS.remove(events)


def drain(events: EventLog) -> None:
    """Tells what was given since the last call."""
    with _LOCK:
        kept = list(_KEPT)
        _KEPT.clear()
    for notice in kept:
        events.warning(notice.event, message=notice.message, **notice.details)
