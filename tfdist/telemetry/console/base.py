"""What consoles have in common: the protocol that a reporter calls, and which epochs are shown."""

from __future__ import annotations

from collections.abc import Callable

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


EPOCH_LINE_SECONDS = 5.0


class EpochThrottle:
    """Holds an epoch back that ends too soon after the last one shown, until its time has come or a newer one ends."""

    def __init__(self, total_epochs: int | None, clock: Callable[[], float]) -> None:
        self._total_epochs = total_epochs
        self._clock = clock
        self._shown_at = -float("inf")
        self._held: EpochSummary | None = None

    def ended(self, summary: EpochSummary) -> EpochSummary | None:
        """The epoch that is to be shown now that this one is over, if any."""
        self._held = summary
        return self.rest() if summary.epoch == self._total_epochs else self.due()

    def due(self) -> EpochSummary | None:
        """The epoch that was held back, if its time has come."""
        return self.rest() if self._clock() - self._shown_at >= EPOCH_LINE_SECONDS else None

    def rest(self) -> EpochSummary | None:
        """The epoch that is still held back, if any: at the end of a run it was the last."""
        held, self._held = self._held, None
        if held is not None:
            self._shown_at = self._clock()
        return held
