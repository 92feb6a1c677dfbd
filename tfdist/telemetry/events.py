"""Keeps the lifecycle of a run: one JSON object an event, and a sentence on the console where there is one.

Invariant: only the chief of a training writes events.jsonl; another worker, or mode, writes a file that bears its
index, or name, and only with its first event. `open_run` makes one log a process and closes it last.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable

from tfdist.errors import printable, redact
from tfdist.storage import files
from tfdist.storage.logs import LogSink
from tfdist.telemetry.console.console import Console
from tfdist.telemetry.facts import Event, Fact, Level
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.run_directory import RunDirectory

RETRY_SECONDS = 10.0  # a bucket takes its time to refuse


class EventLog:
    """Events with the keys time (ISO 8601, UTC, milliseconds), level, event, worker, step and details.

    Args:
      run: whose directory it is kept in.
      mode: as `RunFacts` has it.
      worker: whose log this is; 0 is the chief, which writes what all share.
      console: shows what has a message.
      dispatch: takes each event, once it is written, and what else this process tells.

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
        dispatch: Callable[[Fact], None] = lambda fact: None,
    ) -> None:
        self._log = GuardedLog(run.worker_events(worker, mode))
        self._worker = worker
        self._console = console
        self.dispatch = dispatch
        self._lock = threading.Lock()  # what notes a signal tells from a thread of its own

    def info(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        """Logs an event of a run that goes well. `message` goes to the console, too, and into the details."""
        self._write("info", event, step, message, details)

    def warning(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        """Logs what the run has repaired or skipped, and the user should know."""
        self._write("warning", event, step, message, details)

    def error(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        """Logs what ends the run."""
        self._write("error", event, step, message, details)

    def warn_of_loss(self, problem: str) -> None:
        """Warns of lines that a `GuardedLog` could not write, in its words; of nothing if these are empty."""
        if problem:
            self.warning("log_not_written", message=problem)

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
        self.dispatch(event)
        self.warn_of_loss(problem)


def event_line(event: Event) -> str:
    """Formats an event as a line of events.jsonl."""
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


def time_text(moment: datetime.datetime) -> str:
    """A moment of UTC as ISO 8601 with milliseconds."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class GuardedLog:
    """A log of `files.open_log`, opened with its first line, that cannot end a run: no method raises OSError.

    The first line that could not be written is said, and at the end how many there were: the methods return what the
    user has to be told. The logs of events, metrics and samples write through one each.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._sink: LogSink | None = None
        self._num_lost = 0
        self._retry_at = 0.0

    def write_line(self, line: str) -> str:
        """Adds a line, unless one before it failed a moment ago."""
        if time.monotonic() < self._retry_at:
            self._num_lost += 1
            return ""
        try:
            if self._sink is None:
                self._sink = files.open_log(self._path)
            self._sink.write_line(line)
            return ""
        except OSError as error:
            self._num_lost += 1
            self._retry_at = time.monotonic() + RETRY_SECONDS
            with contextlib.suppress(OSError):
                self._close_sink()  # opening it again ends a line that was written in part
            if self._num_lost > 1:
                return ""
            return f"{self._path} cannot be written: {_reason(error)}. The run continues; this is said once."

    def close(self) -> str:
        """Leaves every line stored; a later line opens the log again."""
        num_lost, self._num_lost, self._retry_at = self._num_lost, 0, 0.0
        problems = []
        if num_lost:
            problems.append(f"{num_lost:,} line{'s' * (num_lost > 1)} of {self._path} could not be written.")
        try:
            self._close_sink()
        except OSError as error:
            problems.append(f"The last lines of {self._path} could not be stored: {_reason(error)}.")
        return " ".join(problems)

    def _close_sink(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()


def _reason(error: OSError) -> str:
    return " ".join((error.strerror or str(error)).split())
