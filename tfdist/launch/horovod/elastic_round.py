"""One round of one elastic worker: the training as a child process, from its start to its end.

Invariant: the child ends within bounded time once the round is over for any worker, and before `run_round` returns;
nothing that it started is left.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import EXIT_DONE, EXIT_PREEMPTED
from tfdist.launch.horovod.elastic_driver import Driver, Place
from tfdist.launch.processes import bound_to_parent, has_ended, send_to_group, shell_status
from tfdist.launch.supervise.hangs import STARTUP
from tfdist.launch.supervise.watch import SYMPTOMS
from tfdist.telemetry import heartbeat
from tfdist.telemetry.heartbeat import Reading

DONE = "done"  # a worker has ended well, which none does before all have done their part
FAILED = "failed"  # what a worker that failed by itself has to say of that
LEAVING = "leaving"  # a worker has asked its child to leave, and with it all
OVER = "over"  # a worker's child has ended, other than well
STOP = "stop"  # a worker's child has ended in a way that would be repeated, and the run with it
POLL_SECONDS = 0.1
_ASK_SECONDS = 1.0  # between two questions to the driver


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long a worker waits for what.

    Attributes:
      notice_seconds: for its child to find out that another has ended, once it trains.
      store_seconds: for its child to store what was saved, if it does so.
      grace_seconds: between SIGTERM and SIGKILL after that.
    """

    notice_seconds: float = 10.0
    store_seconds: float = 300.0
    grace_seconds: float = 5.0

    def end_seconds(self, reading: Reading | None) -> float:
        """How long a child that shows this may take to end by itself, from the end of another's on."""
        if reading is not None and reading.is_storing:
            return self.store_seconds
        return 0.0 if reading is not None and reading.phase in STARTUP else self.notice_seconds


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a child ended.

    Attributes:
      status: as a shell gives it.
      was_told: to end, by a signal that this process received.
      was_asked: to leave, or another of the round, because the hosts have changed.
      was_ended: by this process, because the round was over for another.
      noted_no_signal: it died of SIGTERM, so it had not come to train, and no other child of this round has.
      step: the last one that it showed; None where it showed none.
      facts: that it told.
    """

    status: int
    was_told: bool
    was_asked: bool
    was_ended: bool
    noted_no_signal: bool
    step: int | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_failure(self) -> bool:
        """Whether it was neither well nor wanted that it ended."""
        has_left = self.was_asked or self.status == EXIT_PREEMPTED or bool(self.facts.get("left_after_saving"))
        return self.status != EXIT_DONE and not has_left

    @property
    def hung(self) -> bool:
        """Whether it answered no signal when it should have ended."""
        return self.was_ended and self.status == 128 + signal.SIGKILL

    @property
    def is_own_failure(self) -> bool:
        """Whether nothing but this worker can be to blame."""
        return self.is_failure and not self.was_ended and self.status not in SYMPTOMS


def run_round(
    place: Place,
    *,
    driver: Driver,
    command: Sequence[str],
    environment: Mapping[str, str],
    signals: collections.deque[int],
    hosts_changed: threading.Event,
    say: Callable[[str], None],
    patience: Patience,
    heartbeat_path: Path,
) -> Ending:
    """Runs `command` at `place` until it has ended.

    Args:
      driver: is asked whether the round is over.
      environment: of the child, but for the place.
      signals: that this process received; they are passed on.
      hosts_changed: has the run leave, to continue with the hosts that are there now.
      say: is told what is done and why.
      patience: with a child when the round is over for another worker.
      heartbeat_path: a file that does not exist yet, in which the child shows itself.
    """
    child = _Child(command, {**environment, **place.variables(), heartbeat.VARIABLE: str(heartbeat_path)})
    ends = _Ends(driver, patience, heartbeat_path)
    was_told = was_asked = False
    while not child.has_ended():
        while signals:
            child.send(signals.popleft())
            was_told = True
        if hosts_changed.is_set() and not was_asked:
            was_asked = True
            say(f"{place}: the hosts have changed. The run saves, and continues with those that are there now.")
            driver.tell(LEAVING)
            child.send(signal.SIGTERM)
        for number in ends.due(time.monotonic()):
            say(f"{place}: the round is over for another worker; ending this one's process ({number.name}).")
            child.send(number)
        time.sleep(POLL_SECONDS)
    noted_no_signal, status = child.reap()
    reading = heartbeat.read(heartbeat_path)
    return Ending(
        status,
        was_told=was_told,
        was_asked=was_asked or driver.told(LEAVING) is not None,
        was_ended=ends.has_begun,
        noted_no_signal=noted_no_signal,
        step=reading.step if reading else None,
        facts=heartbeat.read_facts(heartbeat_path),
    )


class _Ends:
    """When a child is ended because the round is over for another."""

    def __init__(self, driver: Driver, patience: Patience, heartbeat_path: Path) -> None:
        self._driver = driver
        self._patience = patience
        self._heartbeat_path = heartbeat_path
        self._ask_at = time.monotonic() + _ASK_SECONDS
        self._over_since = self._kill_at = math.inf
        self.has_begun = False

    def due(self, now: float) -> list[signal.Signals]:
        """The signals to send now."""
        if now >= self._ask_at:
            over = self._driver.told(OVER)
            self._ask_at = now + _ASK_SECONDS if over is None else math.inf
            if over is not None:
                self._over_since = -math.inf if over["noted_no_signal"] else now
        if now >= self._over_since + self._patience.end_seconds(heartbeat.read(self._heartbeat_path)):
            self.has_begun = True
            self._over_since, self._kill_at = math.inf, now + self._patience.grace_seconds
            return [signal.SIGTERM]
        if now >= self._kill_at:
            self._kill_at = math.inf
            return [signal.SIGKILL]
        return []


class _Child:
    """A process group that does not outlive this process. What it writes goes where this process writes."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._popen = subprocess.Popen(
            bound_to_parent(command), env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True
        )

    def has_ended(self) -> bool:
        return has_ended(self._popen.pid)

    def send(self, number: int) -> None:
        if self.has_ended():
            return
        if number == signal.SIGKILL:
            send_to_group(self._popen.pid, number)
        else:
            self._popen.send_signal(number)

    def reap(self) -> tuple[bool, int]:
        """Whether it died of SIGTERM, and its status as a shell gives it."""
        send_to_group(self._popen.pid, signal.SIGKILL)  # what it has left behind, while its number is its own
        status = self._popen.wait()
        return status == -signal.SIGTERM, shell_status(status)
