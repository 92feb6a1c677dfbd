"""What a run tells: events of its life, points of its metrics, samples of its processes, phases.

Invariant: a fact is complete when it is made and never changes, so that any thread may read it. `events.py`,
`metrics_log.py`, `sampler.py` and `time_account.py` make facts, `sinks/sink.py` passes them to the sinks.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any, Literal

Level = Literal["info", "warning", "error"]


def now() -> datetime.datetime:
    """Returns this moment, in UTC."""
    return datetime.datetime.now(datetime.UTC)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of the run, which a sink gets before anything else.

    Attributes:
      directory: the run directory, local or gs://.
      run_id: the same for every start and every worker of the run; 32 hexadecimal digits.
      mode: "train", "evaluate", "follow" or "predict".
      strategy: its name.
      worker: this process's index; `num_workers` of them compute on `num_replicas` devices.
      settings: what is configured, by the names that gin takes, as text.
      config_text: the text of config.gin.
      start: 0 for the run's first start, and one more for each resumption.
      price_per_device_hour: in US dollars; None: not known.
    """

    directory: str
    run_id: str
    mode: str
    strategy: str
    worker: int
    num_workers: int
    num_replicas: int
    settings: Mapping[str, str]
    config_text: str
    start: int
    price_per_device_hour: float | None = None

    @property
    def is_chief(self) -> bool:
        """Whether this is the worker that writes what all share."""
        return self.worker == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """An event of the run.

    Attributes:
      name: as `registry.EVENTS` lists it.
      level: "error" ends the run; what a "warning" is about was mended or passed over.
      worker: whose event it is; None for what no single worker did.
      step: the run's steps that were done then; None where that says nothing.
      message: what the console shows of it, if anything.
      details: for events.jsonl.
    """

    name: str
    level: Level
    worker: int | None = None
    step: int | None = None
    message: str | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    time: datetime.datetime = dataclasses.field(default_factory=now)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """The metrics at a step, over all workers; the chief's alone.

    Attributes:
      step: the run's steps that were done.
      epoch: of the last of them, from 1.
      split: "train", "eval" or the like.
      metrics: numbers, or arrays of them, by name.
      checkpoint: the name of the one that was evaluated; None within a training.
    """

    step: int
    epoch: int
    split: str
    metrics: Mapping[str, Any]
    learning_rate: float | None = None
    checkpoint: str | None = None
    time: datetime.datetime = dataclasses.field(default_factory=now)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """The resources that one process has used so far, every few seconds.

    Attributes:
      worker: its index.
      start: as `RunFacts` has it.
      step: the run's steps that were done; None before it knows.
      seconds: where this process's wall clock went since it began, by the shares of `time_account.SHARES`; they add up
        to all of it.
      values: by the names of `registry.METRICS`, such as "host_memory_bytes".
      process: `TimeAccount.id` of the process.
    """

    time: datetime.datetime = dataclasses.field(default_factory=now)
    worker: int
    start: int
    step: int | None
    seconds: Mapping[str, float]
    values: Mapping[str, float]
    process: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a start, an evaluation or a stall by a checkpoint, when it is over; sinks alone hear of it.

    Attributes:
      worker: its index.
      share: one of the spans of `time_account.PHASES`.
      seconds: that it took, until `time`.
    """

    worker: int
    share: str
    seconds: float
    time: datetime.datetime = dataclasses.field(default_factory=now)


Fact = Event | Point | Sample | Phase
