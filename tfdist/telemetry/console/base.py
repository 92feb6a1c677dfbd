"""What a run tells the person or the program that reads its output.

Invariant: every method returns within microseconds most of the time, and none raises for what it is told.
"""

from __future__ import annotations

from tfdist.telemetry.console.console_text import EpochSummary, Plan, Progress
from tfdist.telemetry.facts import Event, Level, RunFacts


class Console:
    """What a run tells. This one shows nothing."""

    def belongs_to(self, run: RunFacts) -> None:
        """The run is known from now on."""

    def start(self, plan: Plan) -> None:
        """The training begins, or continues."""

    def update(self, progress: Progress) -> None:
        """The training has come this far; most calls show nothing."""

    def end_epoch(self, summary: EpochSummary) -> None:
        """An epoch is over and evaluated; most of those that end within seconds are not shown."""

    def message(self, text: str, level: Level = "info") -> None:
        """A sentence; possible before `start` and after `close`, too."""

    def event(self, event: Event) -> None:
        """Something happened; shown where it has a message."""
        if event.message is not None:
            self.message(event.message, event.level)

    def close(self) -> None:
        """The training is over: shows its last epoch and gives the terminal back. Closing again does nothing."""
