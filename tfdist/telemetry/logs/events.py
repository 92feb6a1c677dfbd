"""Keeps the lifecycle of a run: one JSON object an event, and a sentence on the console where there is one.

Invariant: only the chief of a training writes events.jsonl; another worker, or mode, writes a file that bears its
index, or name, and only with its first event. `open_run` makes one log a process and closes it last.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable

from tfdist.errors import printable, redact
from tfdist.telemetry.console.console import Console
from tfdist.telemetry.facts import Event, Level
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.logs.guarded_log import GuardedLog
from tfdist.telemetry.run_directory import RunDirectory


class EventLog:
    """Events with the keys time (ISO 8601, UTC, milliseconds), level, event, worker, step and details.

    Args:
      run: whose directory it is kept in.
      mode: as `RunFacts` has it.
      worker: whose log this is; 0 is the chief, which writes what all share.
      console: shows what has a message.
      dispatch: takes each event, once it is written.

    Example:

        log = EventLog(run, worker=topology.worker_index, console=console)
        log.info("resumed", step=1200, message="Resuming at step 1,200.", checkpoint="checkpoints/1200")
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        worker: int,
        mode: str = "train",
        console: Console,
        dispatch: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._log = GuardedLog(run.worker_events(worker) if mode == "train" else run.mode_events(mode, worker))
        self._worker = worker
        self._console = console
        self._dispatch = dispatch
        self._lock = threading.Lock()  # what notes a signal tells from a thread of its own

    def info(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        """Something that belongs to a good run. `message` goes to the console, too, and into the details."""
        self._write("info", event, step, message, details)

    def warning(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        """Something that the run mended or passed over, and that the user should know."""
        self._write("warning", event, step, message, details)

    def error(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        """Something that ends the run."""
        self._write("error", event, step, message, details)

    def close(self) -> None:
        """Leaves every event stored; a later event opens the log again."""
        with self._lock:
            problem = self._log.close()
        if problem:
            self._console.event(Event(name="log_not_written", level="warning", worker=self._worker, message=problem))

    def _write(
        self, level: Level, name: str, step: int | None, message: str | None, details: dict[str, object]
    ) -> None:
        message = None if message is None else printable(redact(message))
        details = {each: redact(value) if isinstance(value, str) else value for each, value in details.items()}
        event = Event(name=name, level=level, worker=self._worker, step=step, message=message, details=details)
        self._console.event(event)
        line = event_line(event)
        with self._lock:
            problem = self._log.write_line(line)
        self._dispatch(event)
        if problem:
            self.warning("log_not_written", message=problem)


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
