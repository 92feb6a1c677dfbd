"""Sinks, which take the facts of a run to a tracker, a monitoring system or a user's program, and the stream to them.

A gin file names sinks, `train.sinks = [@prometheus.Prometheus()]`. One of the user's own is a subclass of `Sink`.

Invariant: `SinkDispatcher.dispatch` never waits and never raises for a sink's sake, so that training goes on as without
sinks. The run's own records (the console, events.jsonl, metrics.jsonl, TensorBoard's files) are written before that.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import UserError, check_package
from tfdist.telemetry.facts import Event, Fact, Phase, Point, RunFacts, Sample

MAX_WAITING = 10_000  # facts, for one sink
HANG_SECONDS = 30.0
CLOSE_SECONDS = 15.0


class Sink:
    """Takes facts, on a thread of its own.

    Invariant: all methods of a sink are called by one thread, in the order of the facts, never the training's. A sink
    that raises, or does not return for a while, is dropped with one warning, and the run goes on without it. So a
    method may wait for a network; it should give up by itself after some seconds.

    The constructor raises UserError for what a user got wrong, a library that is not installed included; sockets,
    threads and clients are made in `open`.

    Example:

        class Shouts(Sink):
            def event(self, event):
                if event.level == "error":
                    requests.post("https://example.org/alerts", event.message, timeout=5)

    Attributes:
      every_worker: whether each worker has one of its own; if not, the chief alone. Points are the chief's in any case.
      dashboard_url: where people see what it got; None: it does not know.
    """

    every_worker: bool = False
    dashboard_url: str | None = None

    def open(self, run: RunFacts) -> None:
        """Begins, before any fact; a run that resumes begins again in another process."""

    def event(self, event: Event) -> None:
        """Takes an event of this worker."""

    def point(self, point: Point) -> None:
        """Takes a point of the run's metrics."""

    def sample(self, sample: Sample) -> None:
        """Takes a sample of this worker's process."""

    def phase(self, phase: Phase) -> None:
        """Takes a phase of this worker that is over; those before `open` come first."""

    def close(self, status: str) -> None:
        """Ends, after the last fact. `status`: DONE, PAUSED, PREEMPTED or FAILED."""


DONE, PAUSED, PREEMPTED, FAILED = "done", "paused", "preempted", "failed"  # what `Sink.close` gets


class Tracker(Sink):
    """A sink that keeps numbers by step, under the names of docs/trackers.md; a subclass gives `log`."""

    def log(self, numbers: Mapping[str, float], step: int, time: datetime.datetime) -> None:
        """Logs the numbers of a step."""

    def point(self, point: Point) -> None:
        numbers = {f"{point.split}/{name}": float(v) for name, v in point.metrics.items() if np.ndim(v) == 0}
        if point.split == "train" and point.learning_rate is not None:
            numbers["learning_rate"] = float(point.learning_rate)
        self.log(numbers | {"epoch": float(point.epoch)}, point.step, point.time)

    def sample(self, sample: Sample) -> None:
        numbers = {f"system/{name}": float(value) for name, value in sample.values.items()}
        numbers |= {f"time/{share}": float(seconds) for share, seconds in sample.seconds.items()}
        self.log(numbers, sample.step or 0, sample.time)


class SinkDispatcher:
    """The sinks of one process.

    Args:
      sinks: those of this worker.
      run: what they learn of the run first.
      warn: is called, by whoever dispatches, with which sink was dropped, and why.

    Attributes:
      status: how the run ends, for `Sink.close`; FAILED until it has ended well.
    """

    def __init__(self, sinks: Sequence[Sink], run: RunFacts, *, warn: Callable[[str], None]) -> None:
        self._threads = [_SinkThread(sink, run) for sink in sinks]
        self._warn = warn
        self.status = FAILED

    def dispatch(self, fact: Fact | str) -> None:
        """Gives the fact, or at the end the status, to each sink's thread."""
        for thread in list(self._threads):
            trouble = thread.put(fact)
            if trouble is not None:
                self._drop(thread, trouble)

    def close(self) -> None:
        """Waits until the sinks have taken all, together for CLOSE_SECONDS at most."""
        deadline = time.monotonic() + CLOSE_SECONDS
        self.dispatch(self.status)
        for thread in self._threads:
            trouble = thread.wait(deadline)
            if trouble is not None:
                self._drop(thread, trouble)
        self._threads = []

    def _drop(self, thread: _SinkThread, trouble: str) -> None:
        if thread in self._threads:
            self._threads = [other for other in self._threads if other is not thread]
            thread.is_dropped = True
            self._warn(f"The sink {thread.name} was dropped, and the run goes on without it: {trouble.rstrip('.')}.")


class _SinkThread:
    """One sink and its thread."""

    def __init__(self, sink: Sink, run: RunFacts) -> None:
        self.name = type(sink).__name__
        self.is_dropped = False
        self._sink = sink
        self._facts: queue.Queue[Fact | str] = queue.Queue(MAX_WAITING)  # a status ends it
        self._busy_since: float | None = None
        self._error: BaseException | None = None
        # A daemon, since a sink that hangs must not keep the process.
        self._thread = threading.Thread(target=self._work, args=(run,), name=f"tfdist-{self.name}", daemon=True)
        self._thread.start()

    def put(self, fact: Fact | str) -> str | None:
        """Queues a fact for the sink; returns what is wrong with the sink, or None."""
        busy_since = self._busy_since
        if self._error is not None:
            return f"{type(self._error).__name__}: {self._error}"
        if busy_since is not None and time.monotonic() - busy_since > HANG_SECONDS:
            return f"it has not returned for {HANG_SECONDS:.0f} s"
        try:
            self._facts.put_nowait(fact)
        except queue.Full:
            return f"{MAX_WAITING:,} facts wait for it"
        return None

    def wait(self, deadline: float) -> str | None:
        """Waits until the sink has ended, at most until `deadline`; returns what is wrong with it, or None."""
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
        except BaseException as error:  # SystemExit, too: it would end the thread without a word
            self._error = error
            self._busy_since = None

    def _call(self, method: Callable[..., None], argument: RunFacts | Fact | str) -> None:
        self._busy_since = time.monotonic()
        method(argument)
        self._busy_since = None


def describe_run(run: RunFacts) -> dict[str, Any]:
    """Returns the facts that trackers store of a run beside its settings."""
    return {name: getattr(run, name) for name in ("strategy", "num_workers", "num_replicas", "start", "directory")}


def check_client(sink: str, module: str, package: str, texts: Mapping[str, object]) -> None:
    """Raises UserError where an argument is not a text or None, or a tracker's client is not installed.

    It imports the client: the sink's thread would import its libraries, pandas say, while the data function does, and
    one of two threads that import modules in a circle sees one half made.
    """
    for name, value in texts.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise UserError(f"{sink}.{name} must be a text; received {value!r}.")
    check_package(module, package, module, f"{module}.{sink}")
    with contextlib.suppress(Exception):  # which `open` meets again, and tells
        importlib.import_module(module)
