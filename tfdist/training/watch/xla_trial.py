"""Tries XLA on a run's own calls and keeps what is quickest: `train.xla = 'auto'`.

Invariant: every call trains, whichever variant computes it; a trial costs the time to trace and compile, no data, no
random numbers and no update. All workers try alike, as they follow the chief's clock. A run that fails while it tries,
for want of memory perhaps, is one without XLA when it starts again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

from tfdist.strategies.base import Strategy
from tfdist.training.step.step import TrainStep

MOST_COST = 0.01  # of the time that the run has before it
TRACES = 2.0  # what a variant is expected to cost, in times of the first call, which traces one
FIRST_LOOK, LOOKS_APART = 16, 8  # after calls of these numbers: 16, 128, 1,024, …
ROUNDS = 5
LEAST_GAIN = 0.02
UNCOMPILED = "off"

Settle = Callable[[str, Mapping[str, float]], None]


class Call(NamedTuple):
    """A call of the step: the step it came to, how many it did, and the seconds that they took."""

    step: int
    steps: int
    seconds: float


class XlaTrial:
    """Says which step the next call should run.

    Args:
      strategy: connected.
      uncompiled: the step to begin with.
      variants: make the others, by the name of what is compiled; None: XLA cannot compile it.
      last_step: of the run.
      settle: told what to do from now on, by this start and later ones: first, before anything is tried, to compile
        nothing; at the end what was chosen, and the seconds of a step of each.

    Attributes:
      is_over: whether all is settled.
      compiles_next: whether the next call is the first one of its step.
    """

    def __init__(
        self,
        strategy: Strategy,
        uncompiled: TrainStep,
        variants: Mapping[str, Callable[[], TrainStep | None]],
        last_step: int,
        settle: Settle,
    ) -> None:
        self._course = _course(strategy, uncompiled, variants, last_step, settle)
        self._step = next(self._course)
        self._begun = [self._step]
        self.is_over = self.compiles_next = False

    def after(self, call: Call) -> TrainStep:
        """The step for the next call. Now and then a collective."""
        if not self.is_over:
            try:
                self._step = self._course.send(call)
            except StopIteration as end:
                self._step, self.is_over = end.value, True
            self.compiles_next = self._step not in self._begun
            self._begun = [] if self.is_over else [*self._begun, self._step]  # lets what was not chosen go
        return self._step


def _course(
    strategy: Strategy,
    uncompiled: TrainStep,
    variants: Mapping[str, Callable[[], TrainStep | None]],
    last_step: int,
    settle: Settle,
) -> Generator[TrainStep, Call, TrainStep]:
    budget = yield from _until_worth_it(strategy, uncompiled, len(variants), last_step)
    settle(UNCOMPILED, {})
    tried, spent = {UNCOMPILED: uncompiled}, 0.0
    for name, make in variants.items():
        started = time.perf_counter()
        step = make()
        if step is not None:
            tried[name] = step
            yield step  # compiles
        spent += float(strategy.from_chief([time.perf_counter() - started])[0])
        if spent > budget:
            break
    samples: dict[str, list[float]] = {name: [] for name in tried}
    for _ in range(ROUNDS):
        for name, step in tried.items():
            call = yield step
            samples[name].append(call.seconds / call.steps)
    medians = strategy.sum_over_workers([statistics.median(some) for some in samples.values()])
    seconds = dict(zip(tried, (medians / strategy.topology.num_workers).tolist(), strict=True))
    quickest = min(seconds, key=seconds.__getitem__)
    choice = quickest if seconds[quickest] <= (1 - LEAST_GAIN) * seconds[UNCOMPILED] else UNCOMPILED
    settle(choice, seconds)
    return tried[choice]


def _until_worth_it(
    strategy: Strategy, uncompiled: TrainStep, num_variants: int, last_step: int
) -> Generator[TrainStep, Call, float]:
    """Goes on until the rest of the run is long enough; the seconds that a trial may then take."""
    first = yield uncompiled
    number, look = 1, FIRST_LOOK
    while True:
        call = yield uncompiled
        number += 1
        if number == look:
            look *= LOOKS_APART
            traced, of_step = strategy.from_chief([first.seconds, call.seconds / call.steps]).tolist()
            budget = MOST_COST * of_step * (last_step - call.step)
            if budget >= TRACES * traced * num_variants:
                return budget
