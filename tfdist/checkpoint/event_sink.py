"""Whom the checkpoints tell what happened: `logs.events.EventLog` of telemetry, or what a test or a script puts there.

Invariant: it is called only from the thread that called the checkpoints. Keeper and restore take one.
"""

from __future__ import annotations

from typing import Protocol


class EventSink(Protocol):
    """What of `EventLog` the checkpoints use."""

    def info(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None: ...

    def warning(
        self, event: str, *, step: int | None = None, message: str | None = None, **details: object
    ) -> None: ...
