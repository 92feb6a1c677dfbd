"""Every metric and event that a run tells: its name, unit, kind and meaning.

Invariant: nothing is told that does not stand here. `docs/telemetry.md` has the tables of this page; a test reads the
source for what is told.
"""

from __future__ import annotations

import dataclasses

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that changes with time.

    Attributes:
      name: what monitoring systems know it by.
      kind: COUNTER (only grows while a process lasts), GAUGE, or HISTOGRAM (of single observations).
      unit: "" for a number or a share.
      meaning: a line.
      labels: what tells several series of it apart.
      buckets: upper bounds of a histogram's.
    """

    name: str
    kind: str
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class EventKind:
    """An event that a run may tell.

    Attributes:
      name: in events.jsonl.
      level: "info", "warning" or "error".
      meaning: a line.
      alert: the name by which operators' alerts know it, if another.
    """

    name: str
    level: str
    meaning: str
    alert: str = ""
