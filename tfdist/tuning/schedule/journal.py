"""sweep.jsonl: what happened in a sweep, in order, so that a chief that is started again knows it.

Invariant: an event is in the journal before the oracle is told of it and before anybody acts on it; nothing is ever
rewritten. `asked` on an event that the oracle is told of is how often it had been asked for values before, which is
all that it takes to give it the same calls in the same order again. Written by the chief alone.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.log_sink import LogSink
from tfdist.telemetry.json_text import from_json, to_json

NAME = "sweep.jsonl"
STARTED, ENDED = "sweep_started", "sweep_ended"
TRIAL_KNOWN = "trial_known"  # finished in an earlier sweep
TRIAL_STARTED, TRIAL_REPORTED, TRIAL_ENDED = "trial_started", "trial_reported", "trial_ended"
INTERRUPTED = "interrupted"  # the one end that is none: the trial continues later

OnEvent = Callable[[Mapping[str, Any]], None]


class Journal:
    """The journal of the sweep in a run directory.

    Args:
      run_dir: of the sweep; it exists.
      on_event: is shown each new event after it was written.
      still_ours: called before each event is written; raises when another chief has taken the directory.
    """

    def __init__(self, run_dir: str, on_event: OnEvent, still_ours: Callable[[], None] = lambda: None) -> None:
        self._path = files.join(run_dir, NAME)
        self._on_event = on_event
        self._still_ours = still_ours
        self._sink: LogSink | None = None

    def read(self) -> list[dict[str, Any]]:
        """All events so far; half a line at the end, of a machine that lost its power, does not count."""
        if not files.exists(self._path):
            return []
        return [event for line in files.read(self._path).decode().splitlines() if (event := _parsed(line)) is not None]

    def write(self, event: str, **details: Any) -> None:
        """Adds an event; raises what `still_ours` raises."""
        self._still_ours()
        if self._sink is None:
            self._sink = files.open_log(self._path)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"event": event, "time": now, **details}
        self._sink.write_line(to_json(entry))
        self._on_event(entry)

    def close(self) -> None:
        """Leaves every event stored."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None


@dataclasses.dataclass(frozen=True)
class Identity:
    """What makes two starts the same sweep."""

    objective: str
    direction: str
    search: str
    space: Mapping[str, Any]
    configuration: str
    warm_start: Sequence[str] = ()

    def check(self, started: Mapping[str, Any], run_dir: str) -> None:
        """Raises UserError where the journal's first event is of another sweep."""
        for name, (ours, theirs) in self.differences(started).items():
            shown = "its settings differ" if name == "configuration" else f"there {theirs}, here {ours}"
            raise UserError(
                f"{run_dir} holds another sweep; the {name}: {shown}. Give another --run_dir. "
                "(tune.max_trials, the other budgets and tune.num_workers may change.)"
            )

    def differences(self, started: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Ours and theirs, by name, where the journal's first event is of another sweep."""
        pairs = {field.name: from_json(to_json(getattr(self, field.name))) for field in dataclasses.fields(self)}
        both = {name: (ours, started.get(name)) for name, ours in pairs.items()}
        # Older journals lack what is empty.
        return {name: (ours, theirs) for name, (ours, theirs) in both.items() if ours != theirs and (ours or theirs)}


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        event = from_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
