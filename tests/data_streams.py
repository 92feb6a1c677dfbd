"""Reads sources through `build_pipeline` as a run's workers would, and puts their parts together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.pipeline import build_pipeline
from tfdist.data.sources.source import Source
from tfdist.strategies.strategy import Topology


def global_batches(
    make: Callable[[], Source],
    *,
    steps: int,
    batch_size: int = 8,
    seed: int | None = 5,
    num_workers: int = 1,
    num_local: int = 1,
    first_step: int = 0,
    **plan_settings: Any,
) -> list[list[np.ndarray]]:
    """The arrays of each step's global batch. Every worker makes a source of its own, as processes do."""
    parts = []
    for worker in range(num_workers):
        source = make()
        plan = BatchPlan(
            num_examples=source.num_examples,
            global_batch_size=batch_size,
            num_replicas=num_workers * num_local,
            shuffle_seed=seed,
            **plan_settings,
        )
        stream = build_pipeline(source, plan, Topology(worker, num_workers, num_local), first_step=first_step)
        parts.append(list(itertools.islice(stream.as_numpy_iterator(), steps * num_local)))
    found = []
    for step in range(steps):
        pieces = [piece for own in parts for piece in own[step * num_local : (step + 1) * num_local]]
        flat = [tf.nest.flatten(piece["examples"]) for piece in pieces]
        kept = [
            piece.get("shares", np.ones(len(rows[0]), np.float32)) > 0 for piece, rows in zip(pieces, flat, strict=True)
        ]
        columns = range(len(flat[0]))
        found.append([np.concatenate([rows[c][k] for rows, k in zip(flat, kept, strict=True)]) for c in columns])
    return found


def same(one: list[list[np.ndarray]], other: list[list[np.ndarray]]) -> bool:
    """Whether all batches are equal, bit for bit."""
    return len(one) == len(other) and all(
        np.array_equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


def column(batches: list[list[np.ndarray]], number: int) -> np.ndarray:
    """One array of all batches, end to end."""
    return np.concatenate([batch[number] for batch in batches])
