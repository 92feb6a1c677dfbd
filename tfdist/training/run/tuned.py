"""`train.xla = 'auto'`: which variants a run may try on its own calls, the trial, and what an earlier start has chosen.

Invariant: every call trains, whichever variant computes it; a trial costs the time to trace and compile, no data, no
random numbers and no update. All workers try alike, as they follow the chief's clock. A run that fails while it tries,
for want of memory perhaps, is one without XLA when it starts again.
"""

from __future__ import annotations

import dataclasses
import operator
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.storage import files
from tfdist.strategies.strategy import Strategy
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import Warn, read_record
from tfdist.training.step.layer_state import aggregated_variables, moving_variables
from tfdist.training.step.normalization import batch_norm_layers, is_synchronized
from tfdist.training.step.precision import as_tf_function
from tfdist.training.step.stacked import StackedSteps
from tfdist.training.step.state import Learner
from tfdist.training.step.step import TrainStep

LOOP = "loop"
COMPILED = {"off": (False, False), "pass": (True, False), "update": (False, True), "on": (True, True)}
COMPILED |= {LOOP: COMPILED["on"]}  # several steps together, too
AUTO_XLA = "auto"
XLA_CHOICES = (AUTO_XLA, *COMPILED)
Tell = Callable[..., None]


def xla_variants(
    strategy: Strategy, learner: Learner, *, deterministic: bool = False, stacks: bool = False
) -> list[str]:
    """Returns what `train.xla = "auto"` may try beside no compilation, the likeliest first.

    A clock is no reproducible judge, so that a deterministic run tries nothing. A synchronized batch normalization, or
    a count over all replicas, reduces in the middle of the pass, which XLA cannot compile here; and where updates are
    sharded, or a process has several replicas, they are not of one device. `stacks`: batches can be stacked.
    """
    shards, topology = learner.shards, strategy.topology
    if deterministic or strategy.is_one_program or strategy.stages:
        return []
    counts = topology.num_replicas > 1 and bool(aggregated_variables(learner.model))
    reduces = counts or any(map(is_synchronized, batch_norm_layers(learner.model)))
    passes = not reduces and (shards is None or not any(map(shards.is_sharded, learner.model.trainable_variables)))
    updates = shards is None and topology.num_local_replicas == 1
    names = (LOOP, "on", "pass", "update") if stacks else ("on", "pass", "update")
    return [name for name in names if all(map(operator.le, COMPILED[name], (passes, updates)))]


@dataclasses.dataclass(frozen=True)
class XlaRecord:
    """The content of tuned.json: a key of COMPILED, and what the trial took, by such keys."""

    xla: str
    seconds_per_step: Mapping[str, float] = dataclasses.field(default_factory=dict)


def load_xla_choice(strategy: Strategy, path: str, variants: Sequence[str], warn: Warn) -> str | None:
    """Reads the choice of an earlier start; None where it is not one of `variants` or "off". A collective."""

    def read_stored() -> str:
        found = read_record(path, XlaRecord, warn)
        return "" if found is None else found.xla

    name = strategy.read_on_chief(read_stored, "What the run has chosen cannot be read")
    return name if name in ("off", *variants) else None


def save_xla_choice(strategy: Strategy, path: str, choice: str, seconds: Mapping[str, float], tell: Tell) -> None:
    """Keeps the choice for the next start, and says it where it comes from a trial; a collective."""
    content = to_json(XlaRecord(choice, seconds), indent=2) + "\n"
    strategy.on_chief(lambda: files.write_atomic(path, content), "What the run has chosen cannot be written")
    if seconds:
        each = ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in seconds.items())
        tell("xla_chosen", message=f"XLA {choice}: {each} a step", choice=choice, seconds=dict(seconds))


def can_compile(strategy: Strategy, learner: Learner, step: TrainStep, batch: Any) -> bool:
    """Whether XLA compiles a step on every worker, found without a call of it: one that fails half-way eats its batch.

    A collective. What a pass moves along is put back.
    """
    if isinstance(step, StackedSteps):
        return step.compiles()

    def on_replica(batch: Any) -> tf.Tensor:
        """A scalar that needs every gradient."""
        by_divisor, objective = step.local(batch, counts=False)[0]
        gradients = [g for some in by_divisor.values() for g in some if g is not None]
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        return tf.add_n([*objective.shown.values(), *(tf.cast(tf.reduce_sum(v), tf.float32) for v in values)])

    moving = moving_variables(learner.model)
    before = [keras.ops.convert_to_numpy(variable) for variable in moving]
    is_refused = False
    try:
        as_tf_function(lambda b: strategy.first_local(strategy.run(on_replica, args=(b,))))(batch).numpy()
    except REFUSED:
        is_refused = True
    finally:
        for variable, value in zip(moving, before, strict=True):
            variable.assign(value)
    if strategy.any_worker(is_refused):
        return False
    return not step.compiles_update or not strategy.any_worker(not step.update.compiles(step.local.variables))


# By XLA, of what it cannot compile, or has no memory for.
REFUSED = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.ResourceExhaustedError)
FIRST_SHARE = 0.05  # of the time that the run has before it, for the likeliest variant, and once that has gained
OTHERS_SHARE = 0.01  # for the others, where it has not
TRACES = 2.0  # what a variant is expected to cost, in times of the first call, which traces one
FIRST_LOOK, LOOKS_APART = 16, 8  # after calls of these numbers: 16, 128, 1,024, …
ROUNDS = 5
LEAST_GAIN = 0.02
UNCOMPILED = "off"

Settle = Callable[[str, Mapping[str, float]], None]


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
        self._strategy, self._uncompiled, self._variants = strategy, uncompiled, variants
        self._last_step, self._settle = last_step, settle
        self._trial = self._run()
        self._begun = [next(self._trial)]
        self.is_over = self.compiles_next = False

    @property
    def has_tried(self) -> bool:
        """Whether another step than the uncompiled one has begun."""
        return len(self._begun) > 1

    def observe(self, last_step: int, steps: int, seconds: float) -> TrainStep:
        """The step for the next call, until all is settled. Now and then a collective.

        Args:
          last_step: of the call before.
          steps: how many it did.
          seconds: that they took.
        """
        try:
            step = self._trial.send((last_step, steps, seconds))
        except StopIteration as end:
            step, self.is_over = end.value, True
        self.compiles_next = step not in self._begun
        if self.compiles_next:
            self._begun.append(step)
        return step

    def _run(self) -> Generator[TrainStep, tuple[int, int, float], TrainStep]:
        _, _, traced_seconds = yield self._uncompiled
        rest, number, look = 0.0, 1, FIRST_LOOK
        while rest * FIRST_SHARE <= TRACES * traced_seconds:  # what the likeliest variant is expected to cost
            last_step, steps, seconds = yield self._uncompiled
            number += 1
            if number == look:
                look *= LOOKS_APART
                traced_seconds, of_step = self._strategy.from_chief([traced_seconds, seconds / steps]).tolist()
                rest = of_step * (self._last_step - last_step)
        self._settle(UNCOMPILED, {})
        tried = {UNCOMPILED: self._uncompiled}
        first, *others = self._variants
        yield from self._compile([first], tried, rest)
        means = yield from self._compare(tried)
        budget = rest * (FIRST_SHARE if _choose(means) == first else OTHERS_SHARE)
        if others and budget >= TRACES * traced_seconds * len(others):
            yield from self._compile(others, tried, budget)
            means = yield from self._compare(tried)
        choice = _choose(means)
        self._settle(choice, means)
        return tried[choice]

    def _compile(
        self, names: Sequence[str], tried: dict[str, TrainStep], budget: float
    ) -> Generator[TrainStep, tuple[int, int, float], None]:
        """Adds to `tried` the variants that XLA compiles, until that has taken `budget` seconds."""
        spent = 0.0
        for name in names:
            started = time.perf_counter()
            step = self._variants[name]()
            if step is not None:
                tried[name] = step
                yield step  # compiles
            spent += float(self._strategy.from_chief([time.perf_counter() - started])[0])
            if spent > budget:
                break

    def _compare(
        self, tried: Mapping[str, TrainStep]
    ) -> Generator[TrainStep, tuple[int, int, float], Mapping[str, float]]:
        """Has calls computed by each in turn; returns the seconds of a step."""
        samples: dict[str, list[float]] = {name: [] for name in tried}
        for _ in range(ROUNDS):
            for name, step in tried.items():
                _, steps, seconds = yield step
                samples[name].append(seconds / steps)
        medians = self._strategy.sum_over_workers([statistics.median(some) for some in samples.values()])
        return dict(zip(tried, (medians / self._strategy.topology.num_workers).tolist(), strict=True))


def _choose(means: Mapping[str, float]) -> str:
    """The quickest, or no compilation where that gains too little."""
    quickest = min(means, key=means.__getitem__)
    return quickest if means[quickest] <= (1 - LEAST_GAIN) * means[UNCOMPILED] else UNCOMPILED
