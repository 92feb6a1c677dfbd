"""Decides by short trials what a run leaves to "auto": XLA, and the packing of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.base import Strategy
from tfdist.training.loop.learner import Learner
from tfdist.training.run.probe import quickest
from tfdist.training.step.aggregation import aggregated_variables
from tfdist.training.step.gradients import LocalGradients, LocalSums
from tfdist.training.step.layer_state import moving_variables
from tfdist.training.step.normalization import batch_norm_layers, is_synchronized
from tfdist.training.step.step import TrainStep

XLA_CHOICES = ("on", "off", "auto")
Tell = Callable[..., None]


def choose_xla(
    strategy: Strategy,
    learner: Learner,
    make_gradients: Callable[[bool], LocalGradients],
    batches: Callable[[], Iterator[Any]],
    *,
    xla: str,
    deterministic: bool,
    tell: Tell,
) -> LocalGradients:
    """The forward and backward pass, compiled by XLA or not.

    A synchronized batch normalization, or a count over all replicas, reduces in the middle of the pass, which XLA
    cannot compile here; then, and in deterministic runs (a clock is no reproducible judge), "auto" means off.
    """
    if xla != "auto":
        return make_gradients(xla == "on")
    counts = strategy.topology.num_replicas > 1 and bool(aggregated_variables(learner.model))
    if deterministic or counts or any(map(is_synchronized, batch_norm_layers(learner.model))):
        return make_gradients(False)

    def probe(pass_: LocalGradients) -> Callable[[Any], Any]:
        return lambda batch: _one_number(pass_(batch))

    variants = {"off": make_gradients(False), "on": make_gradients(True)}
    choice, seconds = quickest(
        strategy,
        {name: probe(pass_) for name, pass_ in variants.items()},
        next(batches()),
        keep=moving_variables(learner.model),
    )
    tell("xla_chosen", message=f"XLA {choice}: {_said(seconds)} a pass", choice=choice, seconds=seconds)
    return variants[choice]


def choose_packing(
    strategy: Strategy,
    learner: Learner,
    step: TrainStep,
    batches: Callable[[], Iterator[Any]],
    *,
    deterministic: bool,
    tell: Tell,
) -> None:
    """Settles the strategy's packing of gradients, where it leaves that open."""
    candidates = strategy.packing_candidates()
    if not candidates or deterministic:
        return
    num_bytes = sum(v.value.dtype.size * v.value.shape.num_elements() for v in learner.model.trainable_variables)
    tried = distinct_packings(candidates, num_bytes)
    if len(tried) == 1:
        strategy.set_packing(tried[0])
        return

    def with_packing(size: int) -> Callable[[dict[str, Any]], tf.Tensor]:
        def reduced(batch: dict[str, Any]) -> tf.Tensor:
            strategy.set_packing(size)  # read while the function is traced
            return tf.cast(step.global_sums(batch, step.passes[0]).finite, tf.float32)

        return reduced

    variants = {size: with_packing(size) for size in tried}
    choice, seconds = quickest(strategy, variants, next(batches()), keep=moving_variables(learner.model))
    strategy.set_packing(choice)
    tell("packing_chosen", message=f"bytes_per_pack {choice}: {_said(seconds)}", choice=choice, seconds=seconds)


def distinct_packings(candidates: Sequence[int], num_bytes: int) -> list[int]:
    """The candidates that pack gradients of `num_bytes` in different ways: all that hold them whole are as 0 is."""
    return [0, *(size for size in candidates if 0 < size < num_bytes)]


def _one_number(sums: LocalSums) -> tf.Tensor:
    """A scalar that needs every gradient."""
    gradients = [g for some in sums.gradients.values() for g in some if g is not None]
    return tf.add_n([*sums.shown.values(), *(tf.cast(tf.reduce_sum(_values(g)), tf.float32) for g in gradients)])


def _values(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _said(seconds: dict[Any, float]) -> str:
    return ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in seconds.items())
