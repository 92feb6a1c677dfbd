"""Passes what a run tells to its sinks, and drops a sink that fails or hangs.

Invariant: `tell` never waits and never raises for a sink's sake, so that training goes on as without sinks. The run's
own records (the console, events.jsonl, metrics.jsonl, TensorBoard's files) are written before a fact comes here.
`open_run` makes one stream a process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from tfdist.telemetry.facts import Fact, RunFacts
from tfdist.telemetry.sinks.sink import FAILED, Sink

MOST_WAITING = 10_000  # facts, for one sink
HANG_SECONDS = 30.0
CLOSE_SECONDS = 15.0


class Stream:
    """The sinks of one process.

    Args:
      sinks: those of this worker.
      run: what they learn of the run first.
      warn: hears, from a thread that tells, which sink was dropped, and why.

    Attributes:
      status: how the run ends, for `Sink.close`; FAILED until it has ended well.
    """

    def __init__(self, sinks: Sequence[Sink], run: RunFacts, *, warn: Callable[[str], None]) -> None:
        self._lanes = [_Lane(sink, run) for sink in sinks]
        self._warn = warn
        self.status = FAILED

    def tell(self, fact: Fact) -> None:
        """Gives the fact to each sink's thread."""
        for lane in list(self._lanes):
            trouble = lane.put(fact)
            if trouble is not None:
                self._drop(lane, trouble)

    def close(self) -> None:
        """Waits until the sinks have taken all, together for CLOSE_SECONDS at most."""
        deadline = time.monotonic() + CLOSE_SECONDS
        lanes = [lane for lane in self._lanes if lane.end(self.status)]
        for lane in self._lanes:
            trouble = lane.wait(deadline) if lane in lanes else "it has too much to do"
            if trouble is not None:
                self._drop(lane, trouble)
        self._lanes = []

    def _drop(self, lane: _Lane, trouble: str) -> None:
        if lane in self._lanes:
            self._lanes = [other for other in self._lanes if other is not lane]
            lane.is_dropped = True
            self._warn(f"The sink {lane.name} was dropped, and the run goes on without it: {trouble}.")


class _Lane:
    """One sink and its thread."""

    def __init__(self, sink: Sink, run: RunFacts) -> None:
        self.name = type(sink).__name__
        self.is_dropped = False
        self._sink = sink
        self._facts: queue.Queue[Fact | str] = queue.Queue(MOST_WAITING)  # a status ends it
        self._busy_since: float | None = None
        self._error: Exception | None = None
        # A daemon, since a sink that hangs must not keep the process.
        self._thread = threading.Thread(target=self._work, args=(run,), name=f"tfdist-{self.name}", daemon=True)
        self._thread.start()

    def put(self, fact: Fact) -> str | None:
        """What is wrong with the sink; None: nothing is, and the fact waits for it."""
        busy_since = self._busy_since
        if self._error is not None:
            return f"{type(self._error).__name__}: {self._error}"
        if busy_since is not None and time.monotonic() - busy_since > HANG_SECONDS:
            return f"it has not returned for {HANG_SECONDS:.0f} s"
        try:
            self._facts.put_nowait(fact)
        except queue.Full:
            return f"{MOST_WAITING:,} facts wait for it"
        return None

    def end(self, status: str) -> bool:
        """Has the sink close after all that waits; whether there was room to say so."""
        try:
            self._facts.put_nowait(status)
        except queue.Full:
            return False
        return True

    def wait(self, deadline: float) -> str | None:
        """What is wrong with a sink that was to end by a moment; None: it has."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            return f"{type(self._error).__name__}: {self._error}"
        return f"it was not done {CLOSE_SECONDS:.0f} s after the run" if self._thread.is_alive() else None

    def _work(self, run: RunFacts) -> None:
        try:
            self._call(self._sink.open, run)
            while not isinstance(fact := self._facts.get(), str) and not self.is_dropped:
                self._call(getattr(self._sink, type(fact).__name__.lower()), fact)  # Event: event, …
            if isinstance(fact, str):
                self._call(self._sink.close, fact)
        except Exception as error:
            self._error = error
            self._busy_since = None

    def _call(self, method: Callable[..., None], argument: RunFacts | Fact | str) -> None:
        self._busy_since = time.monotonic()
        method(argument)
        self._busy_since = None
