"""Decides which epochs get a line, so that thousands of short epochs do not flood a terminal or a log.

Invariant: the first epoch and the last are shown, and in between the newest every `EPOCH_LINE_SECONDS` at most.
The consoles ask it; metrics.jsonl has every epoch.
"""

from __future__ import annotations

from collections.abc import Callable

from tfdist.telemetry.console.console_text import EpochSummary

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
