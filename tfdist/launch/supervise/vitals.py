"""What can be seen of each worker from outside: its process, whether that is stopped, and what it shows of itself.

Invariant: looking waits for nobody, so a worker that hangs does not hold up who looks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.launch.processes import Worker
from tfdist.telemetry import heartbeat
from tfdist.telemetry.heartbeat import Reading

MOST_NAMED = 16  # workers, in one message
STOPPED = "T"  # proc(5); "t" is one that a debugger holds


@dataclasses.dataclass(frozen=True)
class Vital:
    """One worker at one moment.

    Attributes:
      worker: its index.
      pid: None before it is started.
      state: the letter of proc(5); empty where there is none.
      reading: what it showed last; None where it has shown nothing.
    """

    worker: int
    pid: int | None
    state: str
    reading: Reading | None

    @property
    def is_stopped(self) -> bool:
        return self.state == STOPPED

    @property
    def step(self) -> int | None:
        return self.reading.step if self.reading else None

    @property
    def name(self) -> str:
        """ "worker 1 (host node7, process 4242)"."""
        known = [f"host {self.reading.host}"] if self.reading else []
        known += [f"process {self.pid}"] if self.pid is not None else []
        return f"worker {self.worker}" + (f" ({', '.join(known)})" if known else "")

    @property
    def position(self) -> str:
        """Where it is: "training, last step 40"."""
        return "has not shown itself" if self.reading is None else f"{self.reading.activity}{self._last_step}"

    def doing(self, now: float) -> str:
        """Where it is, and for how long: "training for 12 s, last step 40"."""
        if self.reading is None:
            return "it has not shown itself"
        return f"{self.reading.activity} for {now - self.reading.moment:.0f} s{self._last_step}"

    @property
    def _last_step(self) -> str:
        return "" if self.step is None else f", last step {self.step:,}"


def look(workers: Sequence[Worker]) -> list[Vital]:
    """Each worker as it is now."""
    return [_look(worker) for worker in workers]


def _look(worker: Worker) -> Vital:
    return Vital(worker.index, worker.pid, worker.state, heartbeat.read(worker.heartbeat))
