"""How long training waits for its input, and what to do about it.

Invariant: what is measured is the time between asking for a step's batches and having those of all local replicas, in
the compiled call itself; no replica waits for the measuring of another's. The first call of a run, which traces and
fills the pipeline, does not count; deterministic runs are not measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.base import Strategy
from tfdist.telemetry.reporter import Reporter
from tfdist.training.step.gradients import beside
from tfdist.training.step.randomness import is_deterministic

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
            batch = tf.nest.map_structure(_same, batch, expand_composites=True)
    return batch, came - asked


def _same(tensor: tf.Tensor) -> tf.Tensor:
    with beside(tensor):
        return tf.identity(tensor)


@dataclasses.dataclass(frozen=True)
class Waited:
    """What the workers waited for input over some calls.

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
        return self.by_worker[self.worst]

    @property
    def is_notable(self) -> bool:
        return self.share >= SHOWN_SHARE and self.seconds[self.worst] >= SHOWN_SECONDS

    @property
    def is_alarming(self) -> bool:
        return self.share >= WARNED_SHARE and self.seconds[self.worst] >= WARNED_SECONDS


class InputWait:
    """Adds up what this worker waits, tells of each epoch, and warns once in a run.

    Args:
      strategy: connected.
      reporter: told at the end of each epoch, and warned.
      hint: what would help with this data, as a sentence.
    """

    def __init__(self, strategy: Strategy, reporter: Reporter, *, hint: str) -> None:
        self._strategy = strategy
        self._reporter = reporter
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
            self._warn(step, Waited((self._run[0],), (self._run[1],)))

    def end_epoch(self, *, step: int, epoch: int) -> None:
        """Brings the workers' figures together and tells them. A collective."""
        figures = self._strategy.gather_from_workers([*self._epoch, *self._run])
        self._epoch[:] = 0
        if figures[:, 1].any():
            self._reporter.input_wait(step=step, epoch=epoch, waited=_waited(figures[:, :2]))
            if not self._warned:
                self._warn(step, _waited(figures[:, 2:]))

    def _warn(self, step: int, waited: Waited) -> None:
        if waited.is_alarming:
            self._warned = True
            self._reporter.input_bound(step=step, waited=waited, hint=self._hint)


def _waited(figures: np.ndarray) -> Waited:
    return Waited(tuple(figures[:, 0].tolist()), tuple(figures[:, 1].tolist()))
