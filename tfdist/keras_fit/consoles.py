"""What `verbose` means: which of the things that a run tells reach the terminal.

Invariant: warnings and errors always do, on standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tfdist.errors import UserError
from tfdist.telemetry.console.base import Console
from tfdist.telemetry.console.console import PlainConsole, open_console
from tfdist.telemetry.console.console_text import EpochSummary, Plan, Progress, epoch_line
from tfdist.telemetry.console.terminal_width import columns_of
from tfdist.telemetry.facts import Level

KNOWN = (0, 1, 2, "auto", "0", "1", "2")


def console_for(verbose: Any) -> Callable[[bool], Console]:
    """Makes the console of the chief, or of another worker.

    Raises:
      UserError: `verbose` is none of Keras's values.
    """
    if verbose not in KNOWN:
        raise UserError(f"verbose is {verbose!r}; write 0, 1, 2 or 'auto'.")
    level = {"0": 0, "2": 2}.get(str(verbose), 1)

    def make(is_chief: bool) -> Console:
        if not is_chief or level == 1:
            return open_console(is_chief=is_chief)
        return EpochLines(sys.stdout, sys.stderr) if level == 2 else WarningsOnly(sys.stdout, sys.stderr)

    return make


class WarningsOnly(PlainConsole):
    """`Console` without what is no trouble."""

    def start(self, plan: Plan) -> None:
        self._plan = plan

    def update(self, progress: Progress) -> None:
        pass

    def end_epoch(self, summary: EpochSummary) -> None:
        pass

    def message(self, text: str, level: Level = "info") -> None:
        if level != "info":
            super().message(text, level)


class EpochLines(WarningsOnly):
    """`Console` that has a line for each epoch besides, however short epochs are: that is what was asked for."""

    def end_epoch(self, summary: EpochSummary) -> None:
        PlainConsole.message(self, epoch_line(self._plan, summary, width=columns_of(self._stdout)))
