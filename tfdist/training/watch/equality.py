"""Compares what the workers have, read and train; one that is apart ends the run.

The first global batch is compared before each worker takes its part of it, or before the first checkpoint where Python
code gives the batches, which may not be asked twice. After that each worker sums the bits of every variable, and all
compare one digest of the sums, with each checkpoint before it is written, and at the run's end. Invariant: a checkpoint
holds what all workers have. A callback that acts on one worker alone is found so, a data function that draws without a
seed, and a machine that computes wrong.

Machines of different kinds may round an update differently. Such a difference is told once and left: all later
comparisons are then of values.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.pipeline import build_pipeline, digest_arrays, dispose
from tfdist.data.sources.source import Source
from tfdist.errors import build_user_error, shorten_list
from tfdist.strategies.strategy import Strategy, Topology
from tfdist.telemetry.events import EventLog
from tfdist.training.step.precision import as_tf_function

MAX_SHOWN = 8  # differences in one message
MAX_VALUE = 200  # characters of a value
MAX_WORKERS = 8  # named for one value
ADVICE = "Give all workers the same configuration, code and files."


def check_agreement(strategy: Strategy, facts: Callable[[], Mapping[str, object]], *, advice: str = ADVICE) -> None:
    """Raises UserError on every worker where one has other `facts`. A collective.

    Args:
      strategy: connected.
      facts: gives values by what they are, as the message names them; compared by their text.
      advice: ends the message.
    """
    if strategy.topology.num_workers == 1:
        return
    mine = json.dumps({name: str(value) for name, value in facts().items()}, sort_keys=True).encode()
    if len(set(gather_digests(strategy, mine).tolist())) == 1:
        return
    facts_of_workers = [json.loads(text) for text in strategy.gather_bytes(mine)]
    names = list(dict.fromkeys(name for each in facts_of_workers for name in each))
    lines = [_line(name, [each.get(name, "(none)") for each in facts_of_workers]) for name in names]
    lines = shorten_list([line for line in lines if line], MAX_SHOWN)
    _raise_difference("\n    ".join(["The workers differ:", *lines]) + f"\n{advice}")


def _raise_difference(text: str) -> NoReturn:
    """Raises UserError for what all workers find at once."""
    error = build_user_error(text, error_id="workers-differ")
    error.is_in_step = True
    raise error


def gather_digests(strategy: Strategy, content: bytes) -> np.ndarray:
    """A digest of every worker's `content`, float64 [num_workers]. A collective."""
    digest = int.from_bytes(hashlib.sha256(content).digest()[:6], "big")  # 48 bits, which a float64 holds
    return strategy.gather_from_workers([digest])[:, 0]


def _line(name: str, values: list[str]) -> str:
    """What the workers have of one fact; empty where all have the same."""
    workers = collections.defaultdict(list)
    for worker, value in enumerate(values):
        workers[value].append(worker)
    if len(workers) == 1:
        return ""
    return f"{name}: " + "; ".join(f"{value[:MAX_VALUE]} on {_name_workers(who)}" for value, who in workers.items())


def _name_workers(workers: list[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(shorten_list([*map(str, workers)], MAX_WORKERS))}"


ROUNDING = 1e-3  # of a variable's largest magnitude
MAX_VARIABLES = 5  # in one message


class Equality:
    """The comparison of one run.

    Args:
      strategy: connected.
      variables: that are the same on every worker, by name.
      events: get a warning where workers round differently.
      compare_data: compares what was read with the other workers, once a step is done.
    """

    def __init__(
        self,
        strategy: Strategy,
        variables: Mapping[str, keras.Variable],
        events: EventLog,
        compare_data: Callable[[], object],
    ) -> None:
        self._strategy = strategy
        self._compare_data: Callable[[], object] | None = compare_data
        self._first_step: int | None = None
        self._variables = variables
        self._events = events
        self._compute_sums = as_tf_function(self._sums)
        self._rounds = False

    def check(self, step: int) -> None:
        """Raises UserError on every worker where one has other values. A collective.

        Args:
          step: that the values are of.
        """
        if self._strategy.topology.num_workers == 1:
            return
        self._first_step = step if self._first_step is None else self._first_step
        if step > self._first_step and self._compare_data is not None:
            self._compare_data()
            self._compare_data = None
        sums = self._compute_sums().numpy()
        digests = gather_digests(self._strategy, sums.tobytes())
        if len(set(digests.tolist())) > 1:
            self._compare(sums, digests, step)

    def _sums(self) -> tf.Tensor:
        return tf.stack([sum_bits(self._read_local(variable)) for variable in self._variables.values()])

    def _read_local(self, variable: keras.Variable) -> tf.Tensor:
        return tf.convert_to_tensor(self._strategy.distribution.experimental_local_results(variable.value)[0])

    def _compare(self, sums: np.ndarray, digests: np.ndarray, step: int) -> None:
        """Raises UserError where values differ by more than rounding, and names the worker and the variables."""
        names = list(self._variables)
        rows = self._strategy.gather_from_workers(sums.astype(np.float64))
        others = np.flatnonzero(digests != digests[0]).tolist()
        apart: list[str] = []
        for index in np.flatnonzero((rows != rows[0]).any(axis=0)).tolist():
            mine = np.asarray(self._read_local(self._variables[names[index]]).numpy())
            sent = self._strategy.broadcast(np.ascontiguousarray(mine).reshape(-1).view(np.uint8).data)
            theirs = np.frombuffer(sent, mine.dtype).reshape(mine.shape)
            change = np.max(np.abs(mine.astype(np.float64) - theirs), initial=0.0)
            largest = np.max(np.abs(theirs.astype(np.float64)), initial=0.0)
            if self._strategy.any_worker(not change <= ROUNDING * largest):
                apart.append(names[index])
        if not apart:
            if not self._rounds:
                self._events.warning(
                    "workers_round_differently",
                    step=step,
                    message=f"Worker {', '.join(map(str, others))} rounds otherwise than the others, as another kind "
                    "of processor does, or TensorFlow's optimizer of graphs: its weights differ in their last digits. "
                    "With train.deterministic = True, workers of one kind give the same bits.",
                    workers=others,
                )
            self._rounds = True
            return
        _raise_difference(
            f"Worker {', '.join(map(str, others))} has other values than worker 0 at step {step:,}: "
            f"{', '.join(shorten_list(apart, MAX_VARIABLES))}. The run ends, and this state is not saved. A callback "
            "that changes something on one worker alone does that: let it decide by `logs`, which are the same on all. "
            "So does a machine that computes wrong: tfdist doctor looks at it."
        )


def sum_bits(value: tf.Tensor) -> tf.Tensor:
    """The sum of a tensor's bits as integers, int64: the same in whatever order they are added."""
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    as_integers = {1: tf.int8, 2: tf.int16}.get(value.dtype.size, tf.int32)
    bits = tf.bitcast(value, as_integers)
    on_gpu = bool(tf.config.list_logical_devices("GPU"))  # whose sums of int32 are computed on the host
    wide = tf.int64 if on_gpu else tf.int32
    return tf.cast(tf.reduce_sum(tf.cast(bits, wide)), tf.int64)


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
    if num_workers == 1 or not source.has_same_batches:
        return
    whole = dataclasses.replace(plan, num_replicas=1, num_microbatches=1, num_parts=None)
    compare_batches(strategy, strategy.on_every_worker(lambda: summarize_batch(_read_first(source, whole))), split)


def compare_first_batch(strategy: Strategy, source: Source, split: str) -> None:
    """Compares the first batches that workers read, if the source notes them; raises UserError on all. A collective."""
    batch = source.first_batch()
    if batch is not None:
        compare_batches(strategy, summarize_batch(batch), split)


def compare_batches(strategy: Strategy, summary: np.ndarray, split: str) -> None:
    """Compares the workers' summaries of a batch; raises UserError on every worker where they differ. A collective."""
    rows = strategy.gather_from_workers(summary)
    sums, magnitudes = rows[:, 0::2], rows[:, 1::2]
    differ = np.abs(sums - sums[0]) > TOLERANCE * np.maximum(magnitudes, magnitudes[0])
    workers = np.flatnonzero(differ.any(axis=1)).tolist()
    if workers:
        _raise_difference(
            f"The first global batch of the {split} data on worker {', '.join(map(str, workers))} is another than on "
            "worker 0. Every worker takes its rows of the same global batch, so all must read the same examples in the "
            "same order. Give whatever draws at random a seed, such as dataset.shuffle(1000, seed=1), "
            "np.random.default_rng(1) or train_test_split(…, random_state=1), and all workers the same files."
        )


def _read_first(source: Source, plan: BatchPlan) -> Any:
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
