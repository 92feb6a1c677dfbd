"""What the chief of a sweep needs of the places where trials run, whoever starts the processes there.

Invariant: a place runs one trial at a time. `workers.py` has the places of this machine, `ray_places.py` those of a Ray
cluster; the chief knows no difference, but for the host that the journal names.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Protocol

from tfdist.launch.ray.cluster import Resources
from tfdist.telemetry.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Setting:
    """What runs in the places, and in how many.

    Attributes:
      arguments: of the command that trains, but for what differs between trials.
      count: of places.
      gpus: what CUDA_VISIBLE_DEVICES calls the GPUs of this machine; none leaves it alone.
      hidden: variables that trials do not see.
      processes: of one trial.
      launcher: of several processes.
      builds_ahead: whether the next trial may be built while others train.
      on_ray: what Ray is to set aside for each process of a trial, where a trial has several there.
    """

    arguments: Sequence[str]
    count: int
    gpus: Sequence[str] = ()
    hidden: Sequence[str] = ()
    processes: int = 1
    launcher: str = ""
    builds_ahead: bool = False
    on_ray: Resources | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a trial is to run; `host` names another machine, None is this one."""

    number: int
    host: str | None = None


@dataclasses.dataclass(frozen=True)
class Next:
    """What will be started next: a run's directory and gin statements; `is_new` where it has none of its own yet."""

    directory: RunDirectory
    parameters: Sequence[str]
    is_new: bool


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that ended.

    Attributes:
      name: of its run directory.
      log: the end of what it wrote, and what is known of its end.
      lost: where nothing is known of its end: why.
    """

    name: str
    status: int
    log: str
    seconds: float
    lost: str = ""


class Executor(Protocol):
    """The places."""

    def fileno(self) -> int:
        """Becomes readable when a process has ended, or a place has become free."""

    @property
    def num_free(self) -> int:
        """How many trials could be started now."""

    @property
    def next_free(self) -> Place:
        """The place where the next process will run; there is one."""

    def start(self, directory: RunDirectory, parameters: Sequence[str]) -> None:
        """Starts a training of this directory, with these gin statements, in the next free place."""

    def build(self, upcoming: Next) -> None:
        """Has what will be started next get ready for its first step where that is possible, while others train."""

    def stop(self, directory: RunDirectory) -> None:
        """Lets a process save and leave; does nothing where it has ended."""

    def ended(self) -> Iterator[Ended]:
        """The processes that ended since; does not wait."""

    def close(self) -> None:
        """Kills what still runs."""


def name_of(directory: RunDirectory) -> str:
    """The last part of its path, which no other run of the sweep has."""
    return os.path.basename(directory.path)
