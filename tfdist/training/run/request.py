"""What the caller of a training or an evaluation asks for beside its settings.

Invariant: imports no TensorFlow, so that a wrong `--profile` is told at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from tfdist.errors import UserError
from tfdist.telemetry.console.console import Console
from tfdist.telemetry.console.progress_bar import open_console


@dataclasses.dataclass(frozen=True)
class Request:
    """The request of a training's or an evaluation's caller, beside its settings.

    Attributes:
      run_dir: where the run is kept, local or gs://.
      config_text: the text of config.gin, asked for when a run begins and again when it has ended well.
      settings: what is configured, by name.
      abort: ends the process at a second Ctrl-C, from a thread of its own; None raises KeyboardInterrupt.
      console: makes what tells the person at the terminal, for the chief or for another worker.
      keeps: whether the run directory outlives the run; if not, nothing is exported and no summaries are written.
      repeats_end: puts a run that is finished back where it ended, from its last checkpoint, and ends it again.
      seeds: whether the process's generators of random numbers are seeded; if not, they stay as the caller has them.
      begins_empty: nothing of earlier starts stays in the run directory.
      initial_epoch: how many epochs the model was trained for elsewhere; they count among `train.epochs`.
      profile: the steps of which TensorFlow's profiler takes a profile.
    """

    run_dir: str
    config_text: Callable[[], str] = lambda: ""
    settings: Callable[[], Mapping[str, str]] = dict
    abort: Callable[[], NoReturn] | None = None
    console: Callable[[bool], Console] = open_console
    keeps: bool = True
    repeats_end: bool = False
    seeds: bool = True
    begins_empty: bool = False
    initial_epoch: int = 0
    profile: ProfiledSteps | None = None


_RIGHT = "Write --profile='steps 100-110', from 1 and with the last step included, or --profile='step 100'."


@dataclasses.dataclass(frozen=True)
class ProfiledSteps:
    """Steps of a run, counted from 1; `last` is one of them."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> ProfiledSteps:
        """Parses "steps A-B" or "step A"; raises UserError for anything else."""
        found = re.fullmatch(r"\s*steps?\s+(\d+)(?:\s*-\s*(\d+))?\s*", text)
        if found is None:
            raise UserError(f"--profile={text!r} names no steps. {_RIGHT}")
        first = int(found[1])
        last = int(found[2] or first)
        if not 1 <= first <= last:
            raise UserError(f"--profile={text!r}: there are no steps {first} to {last}. {_RIGHT}")
        return cls(first, last)

    def check(self, total_steps: int) -> None:
        """Raises UserError where a run of so many steps does not have them all."""
        if self.last > total_steps:
            raise UserError(
                f"--profile asks for the steps {self.first} to {self.last}, and this run has {total_steps:,} steps. "
                "Name steps that it has, or let it train longer."
            )

    def next_edge(self, step: int) -> int | None:
        """The step at which a call that begins after `step` has to end, so that the profiled steps are whole calls."""
        return next((edge for edge in (self.first - 1, self.last) if step < edge), None)
