"""What the caller of a training or an evaluation asks for beside its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NoReturn

from tfdist.telemetry.console.base import Console
from tfdist.telemetry.console.console import open_console
from tfdist.training.watch.profiled_steps import ProfiledSteps


@dataclasses.dataclass(frozen=True)
class Request:
    """What the caller of a training or an evaluation asks for beside its settings.

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
