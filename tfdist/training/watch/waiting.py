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

import math
import statistics
from collections.abc import Callable, Sequence
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


def time_input(strategy: Strategy, take: Callable[[], Any]) -> tuple[Any, tf.Tensor]:
    """What `take` takes from the input, and the seconds, float64, until all of it was there. Inside a tf.function.

    Where TensorFlow is to be deterministic it refuses to look at the clock, and nothing is measured: not a number.
    """
    if is_deterministic():
        return take(), tf.constant(math.nan, tf.float64)
    asked = tf.timestamp()
    with tf.control_dependencies([asked]):
        batch = take()
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


def _measure_wait(figures: np.ndarray) -> tuple[str, dict[str, Any]]:
    """How long the workers waited for input, for people and for the log of events.

    In a synchronous step the worker that waited most holds up all others: its share and its seconds count.

    Args:
      figures: seconds waited, and that the calls took, [num_workers, 2].
    """
    shares = (figures[:, 0] / np.maximum(1e-9, figures[:, 1])).tolist()
    worst = int(np.argmax(figures[:, 0]))
    share, seconds = shares[worst], float(figures[worst, 0])
    is_alone = len(shares) == 1
    text = f"{'' if is_alone else f'worker {worst} '}waited for input {share:.0%} of the time ({seconds:.1f} s)"
    return text, {"share": share, "seconds": seconds} | ({} if is_alone else {"by_worker": shares})


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


class WaitTimes:
    """Adds up what this worker waits for its input and for the others, and compares the workers of a run.

    Args:
      strategy: connected.
      events: get what was waited for input at the end of each epoch, and a warning, once in a run. They get a warning
        of a worker that is slow for some seconds, again only after it was quick, and the times of all at the end.
      hint: what would help with this data, as a sentence.
    """

    def __init__(self, strategy: Strategy, events: EventLog, *, hint: str) -> None:
        self._topology = strategy.topology
        self._strategy = strategy
        self._events = events
        self._hint = hint
        self._begun = False
        self._warned = False
        self._epoch = np.zeros(2)  # seconds waited for input, and of calls
        self._sums = np.zeros(4)  # steps, seconds, of them for input, and for others
        self._last = 0.0  # own seconds a step in the last call; 0 is not known
        self._slow: set[int] = set()  # in the last comparison
        self._told: set[int] = set()
        self._compared = np.zeros(2 + self._topology.num_workers)  # seconds, steps, and each worker's own seconds

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
        """Takes note of a call of `steps` that ended at `step`, and of what `news` came to over all workers.

        `input_seconds` and `peer_seconds` of the call were waits; they are not numbers where nothing is measured.
        """
        if math.isnan(input_seconds):
            return
        if self._begun:
            self._epoch += (input_seconds, seconds)
            self._sums += (steps, seconds, input_seconds, peer_seconds)
            if not self._warned and self._topology.is_chief:  # a long epoch is not waited for
                self._warn(step, self._sums[np.newaxis, [2, 1]])
            self._last = max(0.0, seconds - peer_seconds) / steps
        self._begun = True
        if len(news) > 1 and all(own > 0 for own in news):
            self._compared += (seconds, steps, *(steps * own for own in news))
            if self._compared[0] >= COMPARED_SECONDS:
                self._compare(step, *self._compared[1:].tolist())
                self._compared[:] = 0

    def end_epoch(self, *, step: int, epoch: int) -> None:
        """Brings the workers' figures together and tells them. A collective."""
        figures = self._strategy.gather_from_workers([*self._epoch, *self._sums[[2, 1]]])
        self._epoch[:] = 0
        if figures[:, 1].any():
            text, details = _measure_wait(figures[:, :2])
            is_shown = details["share"] >= SHOWN_SHARE and details["seconds"] >= SHOWN_SECONDS
            message = f"epoch {epoch + 1}: {text}" if is_shown else None
            self._events.info("input_wait", step=step, message=message, epoch=epoch + 1, **details)
            if not self._warned:
                self._warn(step, figures[:, 2:])

    def _warn(self, step: int, figures: np.ndarray) -> None:
        text, details = _measure_wait(figures)
        if details["share"] >= WARNED_SHARE and details["seconds"] >= WARNED_SECONDS:
            self._warned = True
            self._events.warning("input_bound", step=step, message=f"Training: {text}. {self._hint}".strip(), **details)

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
        if not figures[:, 0].all() or np.isnan(figures).any():
            return
        steps, seconds, for_input, for_others = figures.T
        facts = {
            "step_seconds": ((seconds - for_others) / steps).tolist(),
            "input_share": (for_input / seconds).tolist(),
            "idle_share": (for_others / seconds).tolist(),
        }
        rows = [
            f"  worker {worker}: {_milliseconds(own)} a step of its own; of its time {waiting:.0%} waiting for input, "
            f"{idle:.0%} for other workers"
            for worker, (own, waiting, idle) in enumerate(zip(*facts.values(), strict=True))
        ]
        self._events.info("workers", step=step, message="\n".join(["the workers:", *rows]), **facts)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
