"""Decides what a run leaves to `train.xla = "auto"`: which variants may be tried, and which one was chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.storage import files
from tfdist.strategies.base import Strategy
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import Warn, read_record
from tfdist.training.step.gradients import Sums
from tfdist.training.step.layers.aggregation import aggregated_variables
from tfdist.training.step.layers.layer_state import moving_variables
from tfdist.training.step.layers.normalization import batch_norm_layers, is_synchronized
from tfdist.training.step.precision import traced
from tfdist.training.step.state import Learner
from tfdist.training.step.step import TrainStep

COMPILED = {"off": (False, False), "pass": (True, False), "update": (False, True), "on": (True, True)}
AUTO_XLA = "auto"
XLA_CHOICES = (AUTO_XLA, *COMPILED)
Tell = Callable[..., None]


def xla_variants(strategy: Strategy, learner: Learner, *, deterministic: bool = False) -> list[str]:
    """What `train.xla = "auto"` may try beside no compilation, the likeliest first.

    A clock is no reproducible judge, so that a deterministic run tries nothing. A synchronized batch normalization, or
    a count over all replicas, reduces in the middle of the pass, which XLA cannot compile here; and where updates are
    sharded, or a process has several replicas, they are not of one device.
    """
    shards, topology = learner.shards, strategy.topology
    if deterministic or strategy.is_one_program or strategy.stages:
        return []
    counts = topology.num_replicas > 1 and bool(aggregated_variables(learner.model))
    reduces = counts or any(map(is_synchronized, batch_norm_layers(learner.model)))
    passes = not reduces and (shards is None or not any(map(shards.is_apart, learner.model.trainable_variables)))
    updates = shards is None and topology.num_local_replicas == 1
    return [name for name in ("on", "pass", "update") if all(map(operator.le, COMPILED[name], (passes, updates)))]


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What tuned.json holds: a key of COMPILED, and what the trial took, by such keys."""

    xla: str
    seconds_per_step: Mapping[str, float] = dataclasses.field(default_factory=dict)


def stored_xla(strategy: Strategy, path: str, variants: Sequence[str], warn: Warn) -> str | None:
    """What an earlier start has chosen, unless it was under a strategy that could do more; a collective."""

    def stored() -> str:
        found = read_record(path, Tuned, warn)
        return "" if found is None else found.xla

    name = strategy.read_on_chief(stored, "What the run has chosen cannot be read")
    return name if name in ("off", *variants) else None


def store_xla(strategy: Strategy, path: str, choice: str, seconds: Mapping[str, float], tell: Tell) -> None:
    """Keeps the choice for the next start, and says it where it comes from a trial; a collective."""
    content = to_json(Tuned(choice, seconds), indent=2) + "\n"
    strategy.on_chief(lambda: files.write_atomic(path, content), "What the run has chosen cannot be written")
    if seconds:
        tell("xla_chosen", message=f"XLA {choice}: {_said(seconds)} a step", choice=choice, seconds=dict(seconds))


def can_compile(strategy: Strategy, learner: Learner, step: TrainStep, batch: Any) -> bool:
    """Whether XLA compiles a step, found without a call of it: one that fails half-way has eaten its batch."""

    def on_replica(batch: Any) -> tf.Tensor:
        return _one_number(step.local(batch, counts=False))

    if not runs(strategy, on_replica, batch, keep=moving_variables(learner.model)):
        return False
    if not step.compiles_update:
        return True
    trained = step.local.variables
    return not strategy.any_worker(not step.update.compiles(trained))


def _one_number(sums: Sums) -> tf.Tensor:
    """A scalar that needs every gradient."""
    gradients = [g for some in sums[0].values() for g in some if g is not None]
    return tf.add_n([*sums[1].shown.values(), *(tf.cast(tf.reduce_sum(_values(g)), tf.float32) for g in gradients)])


def _values(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _said(seconds: Mapping[Any, float]) -> str:
    return ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in seconds.items())


REFUSED = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)  # by XLA, of what it cannot compile


def runs(
    strategy: Strategy,
    function: Callable[[dict[str, Any]], tf.Tensor],
    batch: Any,
    *,
    keep: Sequence[keras.Variable],
) -> bool:
    """Whether a function runs on every worker. A collective.

    Args:
      strategy: connected.
      function: of a local batch, called in replica context; returns one number that depends on all that it computes.
      batch: the local batches of one step.
      keep: variables to put back to their values afterwards.
    """
    with _kept(keep):
        try:
            traced(lambda b: strategy.first_local(strategy.run(function, args=(b,))))(batch).numpy()
        except REFUSED:
            return not strategy.any_worker(True)
        return not strategy.any_worker(False)


@contextlib.contextmanager
def _kept(variables: Sequence[keras.Variable]) -> Iterator[None]:
    before = [keras.ops.convert_to_numpy(v) for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
