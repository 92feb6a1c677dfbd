"""How long training waits for its input, and which worker holds up the others, while it happens and over the run.

A synchronous step takes as long on every worker, so its length says nothing. What differs is how much of it a worker
spends waiting for the sum of all gradients: a slow worker finds the others' already there. A worker's own time is what
is left of its calls without that wait.

Invariant: waits are measured in the compiled call itself, of batches until those of all local replicas are there, and
no replica waits for the measuring of another's. What workers compare travels with the reduction that a call makes
anyway, as votes do. The first call of a run, which traces and fills the pipeline, does not count; deterministic runs
are not measured.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.strategy import Strategy
from tfdist.telemetry.events import EventLog
from tfdist.training.step.gradients import colocate_with
from tfdist.training.step.randomness import is_deterministic

SLOW_FACTOR = 1.5  # of the median worker's own time
COMPARED_SECONDS = 1.5  # of calls that are compared together; a worker is slow in two such comparisons that follow
SHOWN_SHARE, SHOWN_SECONDS = 0.05, 1.0
WARNED_SHARE, WARNED_SECONDS = 0.2, 3.0


def timed_next(strategy: Strategy, iterator: Iterator[Any]) -> tuple[Any, tf.Tensor]:
    """The next step's batches, and the seconds, float64, until the last of them was there. Inside a tf.function.

    Where TensorFlow is to be deterministic it refuses to look at the clock, and nothing is measured: not a number.
    """
    if is_deterministic():
        return next(iterator), tf.constant(math.nan, tf.float64)
    asked = tf.timestamp()
    with tf.control_dependencies([asked]):
        batch = next(iterator)
    first = tf.nest.flatten(batch)[0]  # all parts of a replica's batch come at once
    with tf.control_dependencies(list(strategy.distribution.experimental_local_results(first))):
        came = tf.timestamp()
    if strategy.topology.num_local_replicas == 1 and not strategy.is_one_program:
        # Where all operations share a thread, as on one core, TensorFlow would compute with them before it looks at the
        # clock.
        with tf.control_dependencies([came]):
            batch = tf.nest.map_structure(_copy_tensor, batch, expand_composites=True)
    return batch, came - asked


def _copy_tensor(tensor: tf.Tensor) -> tf.Tensor:
    with colocate_with(tensor):
        return tf.identity(tensor)


@dataclasses.dataclass(frozen=True)
class WaitTimes:
    """The seconds that the workers waited for input over some calls.

    Attributes:
      seconds: waited, worker by worker.
      of_seconds: that the calls took, worker by worker.
    """

    seconds: tuple[float, ...]
    of_seconds: tuple[float, ...]

    @property
    def by_worker(self) -> list[float]:
        """Each worker's share of its time."""
        return [waited / max(1e-9, of) for waited, of in zip(self.seconds, self.of_seconds, strict=True)]

    @property
    def worst(self) -> int:
        """The worker that waited most; in a synchronous step it holds up all others."""
        return int(np.argmax(self.seconds))

    @property
    def share(self) -> float:
        """The share of its time that the worst worker waited."""
        return self.by_worker[self.worst]

    @property
    def is_notable(self) -> bool:
        """Whether the console shows it."""
        return self.share >= SHOWN_SHARE and self.seconds[self.worst] >= SHOWN_SECONDS

    @property
    def is_alarming(self) -> bool:
        """Whether it is worth a warning."""
        return self.share >= WARNED_SHARE and self.seconds[self.worst] >= WARNED_SECONDS

    @property
    def details(self) -> dict[str, Any]:
        """The figures for the log of events."""
        several = {"by_worker": self.by_worker} if len(self.seconds) > 1 else {}
        return {"share": self.share, "seconds": self.seconds[self.worst], **several}

    def __str__(self) -> str:
        who = f"worker {self.worst} " if len(self.seconds) > 1 else ""
        return f"{who}waited for input {self.share:.0%} of the time ({self.seconds[self.worst]:.1f} s)"


class InputWait:
    """Adds up what this worker waits, tells of each epoch, and warns once in a run.

    Args:
      strategy: connected.
      events: get what was waited at the end of each epoch, and a warning.
      hint: what would help with this data, as a sentence.
    """

    def __init__(self, strategy: Strategy, events: EventLog, *, hint: str) -> None:
        self._strategy = strategy
        self._events = events
        self._hint = hint
        self._begun = False
        self._warned = False
        self._epoch = np.zeros(2)
        self._run = np.zeros(2)

    def observe(self, *, step: int, waited: float, seconds: float) -> None:
        """Takes note of a call that ended at `step`, took `seconds` and `waited` so many of them."""
        if not self._begun or math.isnan(waited):
            self._begun = True
            return
        self._epoch += (waited, seconds)
        self._run += (waited, seconds)
        if not self._warned and self._strategy.topology.is_chief:  # a long epoch is not waited for
            self._warn(step, WaitTimes((self._run[0],), (self._run[1],)))

    def end_epoch(self, *, step: int, epoch: int) -> None:
        """Brings the workers' figures together and tells them. A collective."""
        figures = self._strategy.gather_from_workers([*self._epoch, *self._run])
        self._epoch[:] = 0
        if figures[:, 1].any():
            waited = _measure_wait(figures[:, :2])
            message = f"epoch {epoch + 1}: {waited}" if waited.is_notable else None
            self._events.info("input_wait", step=step, message=message, epoch=epoch + 1, **waited.details)
            if not self._warned:
                self._warn(step, _measure_wait(figures[:, 2:]))

    def _warn(self, step: int, waited: WaitTimes) -> None:
        if waited.is_alarming:
            self._warned = True
            message = f"Training: {waited}. {self._hint}".strip()
            self._events.warning("input_bound", step=step, message=message, **waited.details)


def _measure_wait(figures: np.ndarray) -> WaitTimes:
    return WaitTimes(tuple(figures[:, 0].tolist()), tuple(figures[:, 1].tolist()))


def read_clock(strategy: Strategy, tensors: Sequence[Any]) -> tf.Tensor:
    """The seconds, float64, at which the first and the last tensor are there. Inside a tf.function.

    A backward pass ends with the first variable's gradient; to wait for each would cost some percent of a step of two
    milliseconds with sixty variables. Not a number where there is one worker, or where TensorFlow is to be
    deterministic and refuses to look at the clock.
    """
    if strategy.topology.num_workers == 1 or is_deterministic():
        return tf.constant(math.nan, tf.float64)
    plain = [t.values if isinstance(t, tf.IndexedSlices) else t for t in (tensors[0], tensors[-1])]
    with tf.control_dependencies(plain):
        return tf.timestamp()


@dataclasses.dataclass(frozen=True)
class WorkerTimes:
    """The times of a worker's steps since its first call.

    Attributes:
      step_seconds: its own time a step: input and computing, without waiting for other workers.
      input_share: of its time, waiting for input.
      idle_share: of its time, waiting for other workers and for the sums to travel.
    """

    step_seconds: float
    input_share: float
    idle_share: float


class Stragglers:
    """Compares the workers of a run.

    Args:
      strategy: connected.
      events: get a warning of a worker that is slow for some seconds, again only after it was quick, and the times of
        all workers at the end.
    """

    def __init__(self, strategy: Strategy, events: EventLog) -> None:
        self._topology = strategy.topology
        self._strategy = strategy
        self._events = events
        self._begun = False
        self._last = 0.0  # own seconds a step in the last call; 0 is not known
        self._slow: set[int] = set()  # in the last comparison
        self._told: set[int] = set()
        self._compared = np.zeros(2 + self._topology.num_workers)  # seconds, steps, and each worker's own seconds
        self._sums = np.zeros(4)  # steps, seconds, of them for input, and for others

    def news(self) -> list[float]:
        """What the others should know: own seconds a step, at this worker's place. Summed over the replicas."""
        if self._topology.num_workers == 1:
            return []
        news = [0.0] * self._topology.num_workers
        news[self._topology.worker_index] = self._last / self._topology.num_local_replicas
        return news

    def observe(
        self, *, step: int, steps: int, seconds: float, input_seconds: float, peer_seconds: float, news: Sequence[float]
    ) -> None:
        """Takes note of a call of `steps` that ended at `step`, and of what `news` came to over all workers."""
        if math.isnan(peer_seconds):
            return
        if self._begun:
            self._last = max(0.0, seconds - peer_seconds) / steps
            self._sums += (steps, seconds, input_seconds, peer_seconds)
        self._begun = True
        if len(news) > 1 and all(own > 0 for own in news):
            self._compared += (seconds, steps, *(steps * own for own in news))
            if self._compared[0] >= COMPARED_SECONDS:
                self._compare(step, *self._compared[1:].tolist())
                self._compared[:] = 0

    def _compare(self, step: int, steps: float, *own_seconds: float) -> None:
        times = [own / steps for own in own_seconds]
        median = statistics.median_low(times)  # of two workers the quicker one
        slow = {worker for worker, own in enumerate(times) if own > SLOW_FACTOR * median}
        for worker in sorted((slow & self._slow) - self._told):
            self._events.warning(
                "straggler",
                step=step,
                message=f"worker {worker} holds up the others: a step takes it {_milliseconds(times[worker])}, where "
                f"the median is {_milliseconds(median)}. Look at what else runs on its machine, its clock speed and "
                "its input.",
                slow_worker=worker,
                step_seconds=times[worker],
                median_seconds=median,
            )
        self._told, self._slow = slow & self._slow, slow

    def end(self, step: int) -> None:
        """Brings the workers' figures together and tells them. A collective."""
        if self._topology.num_workers == 1:
            return
        figures = self._strategy.gather_from_workers(self._sums)
        if not figures[:, 0].all():
            return
        times = [_times(*row) for row in figures.tolist()]
        rows = [
            f"  worker {worker}: {_milliseconds(each.step_seconds)} a step of its own; of its time "
            f"{each.input_share:.0%} waiting for input, {each.idle_share:.0%} for other workers"
            for worker, each in enumerate(times)
        ]
        self._events.info(
            "workers",
            step=step,
            message="\n".join(["the workers:", *rows]),
            step_seconds=[each.step_seconds for each in times],
            input_share=[each.input_share for each in times],
            idle_share=[each.idle_share for each in times],
        )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _times(steps: float, seconds: float, for_input: float, for_others: float) -> WorkerTimes:
    return WorkerTimes((seconds - for_others) / steps, for_input / seconds, for_others / seconds)
