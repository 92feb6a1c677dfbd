"""Notes in a run's events.jsonl what its supervisor does: failures, restarts, waiting, giving up.

Invariant: it writes only while none of its workers runs, and to a file of its own if worker 0 is none of them, so that
on gs:// too, where a log is rewritten whole, nobody writes at the same time; and never into a directory that the run
itself has not made. What cannot be stored is said and kept for the next time. Imports no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tfdist.errors import UserError

if TYPE_CHECKING:
    from tfdist.telemetry.facts import Level


class Journal:
    """The supervisor's notes on one run."""

    def __init__(self, say: Callable[[str], None], *, worker: int = 0) -> None:
        self._say = say
        self._worker = worker  # the first of those that are supervised
        self._lines: list[str] = []

    def note(
        self, level: Level, event: str, *, worker: int | None = None, step: int | None = None, **details: object
    ) -> None:
        """Keeps an event of this moment for `store`."""
        from tfdist.telemetry.facts import Event
        from tfdist.telemetry.logs.events import event_line

        self._lines.append(event_line(Event(name=event, level=level, worker=worker, step=step, details=details)))

    def store(self, run_dir: str | None) -> None:
        """Adds what was noted to the events of the run directory, if there is one."""
        if run_dir is None or not self._lines:
            return
        from tfdist.storage import files
        from tfdist.telemetry.run_directory import RunDirectory

        try:
            if not files.is_dir(run_dir):
                return
            directory = RunDirectory(run_dir)
            log = files.open_log(directory.worker_events(self._worker) if self._worker else directory.events)
            try:
                for line in self._lines:
                    log.write_line(line)
            finally:
                log.close()
            self._lines.clear()
        except (OSError, UserError) as error:
            self._say(f"The events of {run_dir} could not be written: {error}")
