"""Tells what happens in a sweep, a line an event.

Invariant: takes the journal's events and nothing else, so that whatever shows them can stand in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfdist.tuning import journal as journals
from tfdist.tuning.space import gin_text


def line(event: Mapping[str, Any]) -> str | None:
    """The line for an event; None for one that is not worth one."""
    kind = event["event"]
    if kind == journals.STARTED:
        trials = f"up to {event['max_trials']} trials" if event["max_trials"] else "trials until it is done"
        return f"tune: {event['search']}, {event['direction']} {event['objective']}, {trials}"
    if kind == journals.TRIAL_STARTED:
        values = "  ".join(f"{path} {_short(value)}" for path, value in event["values"].items())
        until = f" to epoch {event['epochs']}" if event["epochs"] else ""
        return f"trial {event['trial']}{until}, worker {event['worker']}: {values}"
    if kind == journals.TRIAL_REPORTED:
        return f"trial {event['trial']} epoch {event['epoch']}: {_short(event['objective'])}"
    if kind == journals.TRIAL_ENDED:
        score = "" if event["objective"] is None else f", {_short(event['objective'])}"
        message = f": {event['message'].splitlines()[0]}" if event["message"] else ""
        return f"trial {event['trial']} {event['status']} after epoch {event['epochs']}{score}{message}"
    if kind == journals.ENDED:
        return f"sweep ended: {event['num_trials']} trials, best {event['best']}, {_short(event['best_objective'])}"
    return None


def teller(say: Callable[[str], None]) -> journals.OnEvent:
    """Says each event."""

    def tell(event: Mapping[str, Any]) -> None:
        text = line(event)
        if text is not None:
            say(text)

    return tell


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else gin_text(value)
