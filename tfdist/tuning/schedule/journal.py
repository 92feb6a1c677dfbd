"""sweep.jsonl: what happened in a sweep, in order, so that a chief that is started again knows it.

Invariant: an event is in the journal before the oracle is told of it and before anybody acts on it; nothing is ever
rewritten. `asked` on an event that the oracle is told of is how often it had been asked for values before, which is
all that it takes to give it the same calls in the same order again. Written by the chief alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.logs import LogSink
from tfdist.telemetry.json_text import from_json, to_json
from tfdist.telemetry.records import NewerFormatError, as_type, build_damage_error, parse_line

NAME = "sweep.jsonl"
STARTED, ENDED = "sweep_started", "sweep_ended"
TRIAL_STARTED, TRIAL_REPORTED, TRIAL_ENDED = "trial_started", "trial_reported", "trial_ended"


_VALUES = Mapping[str, Any]
_FIELDS: dict[str, dict[str, Any]] = {
    STARTED: {"objective": str, "direction": str, "search": str, "space": Mapping[str, _VALUES]},
    TRIAL_STARTED: {"trial": str, "rung": int, "values": _VALUES, "epochs": int | None, "asked": int},
    TRIAL_REPORTED: {"trial": str, "epoch": int, "step": int, "objective": float, "metrics": _VALUES, "asked": int},
    TRIAL_ENDED: {"trial": str, "rung": int, "status": str, "objective": float | None, "epochs": int, "seconds": float}
    | {"message": str, "values": _VALUES | None, "asked": int},
}


def check_event(path: str, event: Mapping[str, Any]) -> None:
    """Raises UserError where a line of the journal is not an event of a sweep, or a newer tfdist wrote it."""
    try:
        as_type(Any, event)
        kind = as_type(str, event.get("event"), "event")
        as_type(datetime.datetime, event.get("time"), "time")
        for name, kind_of_field in _FIELDS.get(kind, {}).items():
            as_type(kind_of_field, event.get(name), name)
    except NewerFormatError as error:
        raise NewerFormatError(f"{path} {error}") from error
    except (ValueError, OverflowError) as error:
        raise build_damage_error(path, str(error)) from error


class Journal:
    """The journal of the sweep in a run directory.

    Args:
      run_dir: of the sweep; it exists.
      on_event: called with a new event after it was written.
      still_ours: called before each event is written; raises when another chief has taken the directory.
    """

    def __init__(
        self,
        run_dir: str,
        on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
        still_ours: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = files.join(run_dir, NAME)
        self._on_event = on_event
        self._still_ours = still_ours
        self._sink: LogSink | None = None

    def read(self) -> list[dict[str, Any]]:
        """All events so far; half a line at the end, of a machine that lost its power, does not count.

        Raises:
          UserError: the file is damaged, or a newer tfdist wrote it.
        """
        lines, _ = self._lines()
        started: set[Any] = set()
        events = []
        for number, line in enumerate(lines, 1):
            event = parse_line(line)
            if event is None or (number == 1 and event.get("event") != STARTED):
                raise build_damage_error(self._path, f"line {number} is {line[:60].decode(errors='replace')!r}")
            check_event(self._path, event)
            if event["event"] == TRIAL_STARTED:
                started.add(event["trial"])
            elif "trial" in _FIELDS.get(event["event"], {}) and event["trial"] not in started:
                raise build_damage_error(
                    self._path, f"line {number} is of trial {event['trial']}, which no line before starts"
                )
            events.append(event)
        return events

    def _lines(self) -> tuple[list[bytes], bytes]:
        """The lines, and what a crash left of one behind them."""
        try:
            *lines, torn = files.read(self._path).split(b"\n")
        except FileNotFoundError:
            return [], b""
        return (lines, torn) if parse_line(torn) is None else ([*lines, torn], b"")

    def write(self, event: str, **details: Any) -> None:
        """Adds an event; raises what `still_ours` raises."""
        self._still_ours()
        if self._sink is None:
            lines, torn = self._lines()
            if torn:
                files.write_atomic(self._path, b"".join(line + b"\n" for line in lines))
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


def check_identity(identity: Mapping[str, Any], started: Mapping[str, Any], run_dir: str) -> None:
    """Raises UserError where the journal's first event is of another sweep."""
    for name, own in from_json(to_json(identity)).items():
        theirs = started.get(name)
        if own != theirs and (own or theirs):  # older journals lack what is empty
            shown = "its settings differ" if name == "configuration" else f"there {theirs}, here {own}"
            raise UserError(
                f"{run_dir} holds another sweep; the {name}: {shown}. Give another --run_dir. "
                "(tune.max_trials, the other budgets and tune.num_workers may change.)",
                error_id="another-experiment",
            )
