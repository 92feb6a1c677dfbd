"""What can be seen of each worker from outside, and which of them hangs while the others wait for it.

Workers of one run go through the same turns, so the one that the others wait for is the hindmost: it has begun fewer
of them. Only its own deadline counts, however long the others have waited.

Invariant: a deadline is learned from the turns that the same worker has made of the same kind; what it does for the
first time (compiling, above all) has the deadline of a start. Time in which the supervisor itself did not run counts
for nobody. Looking waits for no worker either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdist.launch.processes import Worker
from tfdist.telemetry import heartbeat
from tfdist.telemetry.heartbeat import Reading

MAX_NAMED = 16  # workers, in one message
STOPPED = "T"  # proc(5); "t" is one that a debugger holds
STOPPED_SECONDS = 5.0
STOPPED_WORDS = "it is stopped, as by SIGSTOP"
STILL_SECONDS = 5.0  # at the least, before a failure is put down to a worker that did not move
BLIND_SECONDS = 5.0  # between two looks: the supervisor was stopped itself, or the machine slept
MIN_SECONDS = {
    heartbeat.TRAINING: 60.0,
    heartbeat.EVALUATING: 60.0,
    heartbeat.AGREEING: 60.0,
    heartbeat.SAVING: 300.0,
}
TIMES_RECENT, TIMES_LONGEST = 10.0, 2.0
STARTUP = (heartbeat.STARTING, heartbeat.CONNECTING, heartbeat.PREPARING, heartbeat.BUILDING, heartbeat.RESTORING)
OUT_OF_TURN = (heartbeat.LEAVING,)


@dataclasses.dataclass(frozen=True)
class Vital:
    """The state of one worker at one moment.

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
    def shows_stacks(self) -> bool:
        return self.reading is not None and self.reading.shows_stacks

    @property
    def step(self) -> int | None:
        return self.reading.step if self.reading else None

    @property
    def name(self) -> str:
        """The worker's name in messages: "worker 1 (host node7, process 4242)"."""
        known = [f"host {self.reading.host}"] if self.reading else []
        known += [f"process {self.pid}"] if self.pid is not None else []
        return f"worker {self.worker}" + (f" ({', '.join(known)})" if known else "")

    @property
    def position(self) -> str:
        """The worker's phase and step: "training, last step 40"."""
        return "has not shown itself" if self.reading is None else f"{self.reading.activity}{self._last_step}"

    def describe_position(self, now: float) -> str:
        """Formats the worker's phase, its seconds and the step: "training for 12 s, last step 40"."""
        if self.reading is None:
            return "it has not shown itself"
        return f"{self.reading.activity} for {now - self.reading.moment:.0f} s{self._last_step}"

    @property
    def _last_step(self) -> str:
        return "" if self.step is None else f", last step {self.step:,}"


def read_vitals(workers: Sequence[Worker]) -> list[Vital]:
    """Each worker as it is now."""
    return [Vital(each.index, each.pid, each.state, heartbeat.read(each.heartbeat)) for each in workers]


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long a worker may take for a turn.

    Attributes:
      start_seconds: for what it does for the first time, and for what belongs to a user (callbacks).
      given_seconds: for what it has done before, in place of what was learned.
      end_hangs: ends a start in which a worker exceeds them; else that is only said.
    """

    start_seconds: float = 1800.0
    given_seconds: float | None = None
    end_hangs: bool = False

    def of(self, reading: Reading | None) -> float:
        """Seconds; infinite while data is prepared, which takes what it takes."""
        if reading is None:
            return self.start_seconds
        if reading.phase == heartbeat.PREPARING:
            return math.inf
        if not reading.recent_seconds or reading.phase in STARTUP:
            return self.start_seconds
        if self.given_seconds is not None:
            return self.given_seconds
        least = MIN_SECONDS.get(reading.phase, self.start_seconds)
        return max(least, TIMES_RECENT * reading.recent_seconds, TIMES_LONGEST * reading.longest_seconds)


@dataclasses.dataclass(frozen=True)
class Hang:
    """Workers of which one holds up the others, and how that shows.

    Attributes:
      suspects: one, where it could be told.
      why: a clause with "it" for the worker.
    """

    suspects: tuple[Vital, ...]
    why: str


class Watcher:
    """Looks at the workers of one start, again and again."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._stopped_since: dict[int, float] = {}
        self._seen_since: dict[int, float] = {}
        self._last_look = -math.inf
        self._not_before = -math.inf

    def find(self, vitals: Sequence[Vital], now: float) -> Hang | None:
        """The hang that there is at `now`, by `time.monotonic`."""
        if now - self._last_look > BLIND_SECONDS:
            self._not_before = now
            self._stopped_since.clear()
        self._last_look = now
        for vital in vitals:
            self._seen_since.setdefault(vital.worker, now)
            if not vital.is_stopped:
                self._stopped_since.pop(vital.worker, None)
            elif now - self._stopped_since.setdefault(vital.worker, now) >= STOPPED_SECONDS:
                return Hang((vital,), STOPPED_WORDS)
        if not any(vital.reading for vital in vitals):
            return None  # programs that show nothing
        last = find_hindmost(vitals)
        late = [v for v in last if self._silent_seconds(v, now) > self._deadlines.of(v.reading)]
        if len(late) < len(last):
            return None
        stopped = [vital for vital in late if vital.is_stopped]
        if stopped:
            return Hang((stopped[0],), STOPPED_WORDS)
        least = min(self._deadlines.of(v.reading) for v in late)
        return Hang(tuple(late), f"it has shown no progress for more than {least:.3g} s")

    def _silent_seconds(self, vital: Vital, now: float) -> float:
        since = vital.reading.moment if vital.reading else self._seen_since[vital.worker]
        return now - max(since, self._not_before)


def find_hindmost(vitals: Sequence[Vital]) -> list[Vital]:
    """Finds the workers that the others wait for; all, where they are equally far."""
    least = min(map(_measure_progress, vitals), default=None)
    return [vital for vital in vitals if _measure_progress(vital) == least]


def find_stalled(vitals: Sequence[Vital], now: float) -> list[Vital]:
    """Finds workers that hold up the others at `now`: stopped, or hindmost and late for a turn they made before."""

    def is_late(reading: Reading | None) -> bool:
        if reading is None or not reading.recent_seconds:
            return False
        return now - reading.moment > max(STILL_SECONDS, TIMES_RECENT * reading.recent_seconds)

    last = [vital.worker for vital in find_hindmost(vitals)]
    return [vital for vital in vitals if vital.is_stopped or (vital.worker in last and is_late(vital.reading))]


def find_missing(vitals: Sequence[Vital]) -> Hang | None:
    """Finds the worker whose peers gave up on it: one that is stopped, or that has not come as far as to meet them."""
    stopped = [vital for vital in vitals if vital.is_stopped]
    if stopped:
        return Hang((stopped[0],), STOPPED_WORDS)
    early = [v for v in vitals if v.reading is None or v.reading.phase == heartbeat.STARTING]
    if early and any(vital.reading for vital in vitals):
        return Hang((early[0],), "the others waited for it, and it did not come")
    return None


def _measure_progress(vital: Vital) -> tuple[int, int]:
    """How far a worker is, in an order that is the same for all of a run; one that gave up is behind."""
    reading = vital.reading
    if reading is None:
        return 0, 0
    return int(reading.phase not in OUT_OF_TURN), reading.turn
