"""What takes the facts of a run elsewhere: to a tracker, a monitoring system, a program of the user's.

A gin file names them, `train.sinks = [@prometheus.Prometheus()]`. One of the user's own is a subclass of `Sink`.
"""

from __future__ import annotations

from tfdist.telemetry.facts import Event, Point, RunFacts, Sample


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
    """

    every_worker: bool = False

    def open(self, run: RunFacts) -> None:
        """Begins, before any fact; a run that resumes begins again in another process."""

    def event(self, event: Event) -> None:
        """Takes an event of this worker."""

    def point(self, point: Point) -> None:
        """Takes a point of the run's metrics."""

    def sample(self, sample: Sample) -> None:
        """Takes a sample of this worker's process."""

    def close(self, status: str) -> None:
        """Ends, after the last fact. `status`: "done", "paused", "preempted" or "failed"."""
