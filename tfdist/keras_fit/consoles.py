"""The callbacks of a call of `tfdist.fit`, and the console for its `verbose`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import UserError
from tfdist.telemetry.console.console import Console, write_line
from tfdist.telemetry.console.console_text import EpochSummary, TrainingPlan, epoch_line
from tfdist.telemetry.console.progress_bar import open_console
from tfdist.telemetry.facts import Level

KNOWN = (0, 1, 2, "auto", "0", "1", "2")


def console_for(verbose: Any) -> Callable[[bool], Console]:
    """Makes the console of the chief, or of another worker.

    Raises:
      UserError: `verbose` is none of Keras's values.
    """
    if verbose not in KNOWN:
        raise UserError(f"verbose is {verbose!r}; write 0, 1, 2 or 'auto'.")
    level = 1 if verbose == "auto" else int(verbose)

    def make_console(is_chief: bool) -> Console:
        if not is_chief or level == 1:
            return open_console(is_chief=is_chief)
        return EpochLines() if level == 2 else WarningsOnly()

    return make_console


class WarningsOnly(Console):
    """A `Console` that shows warnings and errors alone."""

    def message(self, text: str, level: Level = "info") -> None:
        if level != "info":
            write_line(self._stderr, text, level)


class EpochLines(WarningsOnly):
    """`Console` that has a line for each epoch besides, however short epochs are: that is what was asked for."""

    def start(self, plan: TrainingPlan) -> None:
        self._plan = plan

    def end_epoch(self, summary: EpochSummary) -> None:
        write_line(sys.stdout, epoch_line(self._plan, summary))


def flatten_callbacks(callbacks: Any) -> tuple[list[keras.callbacks.Callback], bool]:
    """Flattens one callback, a nest, or a CallbackList; also returns whether to show the run's progress.

    A CallbackList decides itself what is shown, by a ProgbarLogger in it: for one the second value is False.

    Raises:
      UserError: one of them is no callback, or cannot work here.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        given, shows = list(callbacks.callbacks), False
    else:
        given, shows = [each for each in keras.tree.flatten(callbacks) if each is not None], True
    for callback in given:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError(f"callbacks holds {callback!r}, which is no keras.callbacks.Callback.")
    return given, shows
