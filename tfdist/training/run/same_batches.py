"""Compares the first global batch of all workers, before each takes its part of it.

Invariant: what makes workers read other examples, or in another order (an unseeded shuffle, another file), is refused
before a step is trained on it, or before its weights are saved where Python code gives the batches, which may not be
asked twice. A batch that rounds otherwise on another machine is the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.order.batches import BatchPlan
from tfdist.data.pipeline.pipeline import build_pipeline, digest_arrays, dispose
from tfdist.data.sources.source import Source
from tfdist.errors import UserError
from tfdist.strategies.base import Strategy, Topology

TOLERANCE = 1e-4  # of a sum of magnitudes


def check_same_batches(strategy: Strategy, source: Source, plan: BatchPlan, split: str) -> None:
    """Raises UserError on every worker where their first global batches differ. A collective.

    Args:
      strategy: connected.
      source: of the examples, prepared.
      plan: of the batches.
      split: "training", "evaluation" or "prediction", for the message.
    """
    num_workers = strategy.topology.num_workers
    if num_workers == 1 or not source.has_same_batches(trains=plan.shuffle_seed is not None):
        return
    whole = dataclasses.replace(plan, num_replicas=1, num_microbatches=1)
    compare_batches(strategy, strategy.on_every_worker(lambda: summarize_batch(_first(source, whole))), split)


def compare_first_batch(strategy: Strategy, source: Source, split: str) -> None:
    """Raises UserError on every worker where those that were read differ, if the source notes it. A collective."""
    batch = source.first_batch()
    if batch is not None:
        compare_batches(strategy, summarize_batch(batch), split)


def compare_batches(strategy: Strategy, summary: np.ndarray, split: str) -> None:
    """Raises UserError on every worker where they have not summarized the same batch. A collective."""
    rows = strategy.gather_from_workers(summary)
    sums, magnitudes = rows[:, 0::2], rows[:, 1::2]
    differ = np.abs(sums - sums[0]) > TOLERANCE * np.maximum(magnitudes, magnitudes[0])
    workers = np.flatnonzero(differ.any(axis=1)).tolist()
    if workers:
        error = UserError(
            f"The first global batch of the {split} data on worker {', '.join(map(str, workers))} is another than on "
            "worker 0. Every worker takes its rows of the same global batch, so all must read the same examples in the "
            "same order. Give whatever draws at random a seed, such as dataset.shuffle(1000, seed=1), "
            "np.random.default_rng(1) or train_test_split(…, random_state=1), and all workers the same files."
        )
        error.is_in_step = True
        raise error


def _first(source: Source, plan: BatchPlan) -> Any:
    iterator = iter(build_pipeline(source, plan, Topology(0, 1, 1)))
    batch = next(iterator)["examples"]
    dispose(iterator)
    return batch


def summarize_batch(batch: Any) -> np.ndarray:
    """Two numbers of each array in a nest, one after the other."""
    return np.concatenate([[0.0, 0.0], *map(summarize_array, tf.nest.flatten(batch))])


def summarize_array(values: Any) -> np.ndarray:
    """Two numbers of an array, [sum, magnitude]: the sums of arrays that differ are apart by a share of the magnitude.

    Floats are weighted by their place, so that another order is another sum; anything else has a digest for a sum.
    """
    values = np.asarray(values)
    if values.dtype.kind in "fV":  # V is bfloat16's
        flat = np.nan_to_num(values.astype(np.float64).ravel())
        weights = np.random.default_rng(0).random(flat.size)
        return np.array([flat @ weights, np.abs(flat) @ weights])
    return np.array([float(int(digest_arrays([values])[:12], 16)), 0.0])  # 48 bits, which a float64 holds
