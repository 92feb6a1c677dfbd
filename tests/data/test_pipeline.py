"""Local streams of several workers together are the plan's batches, from any step on."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import random
import sys
from typing import Any

import numpy as np
import pytest
import support
import tensorflow as tf
from mistakes import each_is_refused

from tfdist.data.batches import BatchPlan
from tfdist.data.pipeline import build_pipeline
from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.source import Order, Reader, Source, StagedReader, permute
from tfdist.strategies.strategy import Topology

EXAMPLES = 29


def source() -> ArraySource:
    numbers = np.arange(EXAMPLES)
    return ArraySource(({"number": numbers, "square": numbers.astype(np.float64) ** 2}, numbers[:, np.newaxis] % 3))


def test_arrays_are_held_once_and_are_not_the_users() -> None:
    given = np.arange(12.0, dtype=np.float32).reshape(6, 2), np.arange(6) % 2 == 0, np.array([f"{n}" for n in range(6)])
    held = ArraySource(given)
    readers = [tf.function(held.gatherer(), autograph=False).get_concrete_function(tf.constant([0])) for _ in range(2)]
    given[0][:] = -1.0
    for reader in readers:
        numbers, flags, texts = reader(tf.constant([4, 1]))
        assert (numbers.numpy().tolist(), flags.numpy().tolist()) == ([[8.0, 9.0], [2.0, 3.0]], [True, False])
        assert texts.numpy().tolist() == [b"4", b"1"]
    memory = {np.asarray(reader.captured_inputs[0]).ctypes.data for reader in readers}
    assert memory == {held.arrays_in_memory()[0].ctypes.data}


HELD = """
import numpy as np, psutil
from data.test_pipeline import ArraySource, Topology, build_pipeline, plan
from tensorflow import constant
constant(0.0)
resident = lambda: psutil.Process().memory_info().rss
before, x = resident(), np.ones((25_000, 1000), np.float32)
size, held = x.nbytes, ArraySource((x, np.arange(25_000)))
del x
streams = [iter(build_pipeline(held, plan(num_examples=25_000, num_replicas=1), Topology(0, 1, 1))) for _ in range(2)]
assert all(next(stream)["examples"][0].shape == (12, 1000) for stream in streams)
print((resident() - before) / size)
"""


@pytest.mark.slow
def test_a_process_holds_the_examples_once() -> None:
    finished = support.run_python(["-c", HELD], env=support.TESTS_PATH).check()
    assert float(finished.stdout.split()[-1]) < 1.5  # with tf.constant and a rewritten pipeline it is 4


def plan(**settings: Any) -> BatchPlan:
    return BatchPlan(**{"num_examples": EXAMPLES, "global_batch_size": 12, "shuffle_seed": 5} | settings)


def taken(batches: BatchPlan, topology: Topology, *, steps: int, first_step: int = 0) -> list[Any]:
    stream = build_pipeline(source(), batches, topology, first_step=first_step)
    return list(itertools.islice(stream.as_numpy_iterator(), steps * topology.num_local_replicas))


@pytest.mark.parametrize(("first_step", "pad"), [(1, True), (8, False), (1000, True)])
def test_a_stream_from_a_step_on_is_the_stream_that_skips_to_it(first_step: int, pad: bool) -> None:
    batches, topology = plan(num_replicas=4, num_microbatches=3, pad=pad), Topology(1, 2, 2)
    skipped = build_pipeline(source(), batches, topology).skip(first_step * 2)
    expected = list(itertools.islice(skipped.as_numpy_iterator(), 8))
    for ours, theirs in zip(taken(batches, topology, steps=4, first_step=first_step), expected, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [({"pad": True}, 6), ({"drop_remainder": True}, 6), ({"num_examples": 24}, 6), ({}, None)],
    ids=["padded", "the remainder dropped", "no remainder", "a remainder"],
)
def test_shapes_are_static_where_all_batches_are_full(settings: dict[str, Any], rows: int | None) -> None:
    batches = plan(num_replicas=2, num_microbatches=3, **settings)
    spec = build_pipeline(source(), batches, Topology(0, 1, 2)).element_spec
    splits, first_rows = spec.pop("splits", None), spec.pop("first_rows", None)
    shapes = [s.shape.as_list() for s in tf.nest.flatten(spec)]
    of_shares = [] if rows and not batches.pad else [[rows]]
    assert shapes == [[rows], [rows], [rows, 1], *of_shares] and (splits is None) == (rows is not None)
    assert first_rows is None or first_rows.shape == [3]


def test_objects_that_are_texts_are_texts() -> None:
    words = np.array([["", "köln"], [b"\xff\x00", "x" * 1000]], dtype=object)  # as pandas has them
    found = ArraySource({"words": words})
    assert found.structure["words"] == tf.TensorSpec([None, 2], tf.string)
    assert found.gatherer()(tf.constant([1, 0]))["words"].numpy().tolist() == [
        [b"\xff\x00", b"x" * 1000],
        [b"", "köln".encode()],
    ]


test_data_that_is_none_gives_the_message = each_is_refused(
    lambda data: as_source(data),
    (None, "returned NoneType"),
    ("digits", "returned str"),
    (tf.data.Dataset.range(3).map(lambda i: (i, i, i, i)), r"dataset gives x, \(x, y\) or"),
    ((np.zeros(3), np.zeros(4)), r"same number of examples.*lengths \[3, 4\]"),
    ((), "no arrays"),
    ((np.zeros(3), [5, 6, 7]), r"one entry an example; received int '5'.*write np\.array"),
    ((np.zeros(3), np.zeros(3, "datetime64[D]")), "returns arrays; received ndarray .*M8"),
    ((np.zeros(3), tf.keras.utils.PyDataset()), "received PyDataset"),
    ((np.zeros(3), None), "one entry an example; received NoneType"),
    ((np.zeros(3), np.array([[1], [1, 2], []], dtype=object)), r"Python objects, such as \[1\]"),
    ((np.zeros(3), np.array(["a", "b", float("nan")], dtype=object)), "str or bytes; received .* such as nan"),
)


class _Fetching(Source):
    """Squares, fetched by Python code and decoded by TensorFlow."""

    num_examples = 20
    structure = tf.TensorSpec([None], tf.int64)
    calls_python = True

    def reader(self, order: Order) -> StagedReader:
        def fetch(positions: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(lambda held: held**2, [positions], tf.int64), [None])

        return StagedReader(fetch, lambda squares: squares + 1)


@tf.function
def _later(positions: tf.Tensor) -> tf.Tensor:
    if positions[0] > 3:
        return positions + 100
    return positions


class _Looking(Source):
    """Tells from which files the code was taken that ran: the user's own, or what AutoGraph made of it.

    Where Python decides by tensors, a `tf.function` does.
    """

    num_examples = 20
    structure = tf.TensorSpec([None], tf.int64)

    def __init__(self, *, is_staged: bool, **kind: bool) -> None:
        self._is_staged = is_staged
        self.seen: set[str] = set()
        vars(self).update(kind)

    def reader(self, order: Order) -> Reader:
        def look(positions: tf.Tensor, *epoch: tf.Tensor) -> tf.Tensor:
            self.seen.add(sys._getframe().f_code.co_filename)
            return _later(positions)

        return StagedReader(look, look) if self._is_staged else look


@pytest.mark.parametrize("is_staged", [True, False])
@pytest.mark.parametrize("kind", [{}, {"calls_python": True}, {"waits": True}])
def test_a_readers_code_is_traced_as_it_is_however_it_is_run(kind: dict[str, bool], is_staged: bool) -> None:
    looking = _Looking(is_staged=is_staged, **kind)
    batches = plan(num_examples=8, num_replicas=1, global_batch_size=4, shuffle_seed=None)
    stream = build_pipeline(looking, batches, Topology(0, 1, 1)).as_numpy_iterator()
    assert [next(stream)["examples"][0] for _ in range(2)] == [0, 204 if is_staged else 104]
    assert looking.seen == {__file__}


@pytest.mark.slow
def test_what_fetches_lives_as_long_as_the_iterator() -> None:
    batches = plan(num_examples=20, num_replicas=1, global_batch_size=4)
    iterator = iter(build_pipeline(_Fetching(), batches, Topology(0, 1, 1), first_step=2))
    gc.collect()
    found = [next(iterator)["examples"].numpy().tolist() for _ in range(30)]
    assert found[:3] == [[n * n + 1 for n in range(first, first + 4)] for first in (8, 12, 16)]
    assert found[3:8] == found[8:13]


# Plans


REPLICAS = (1, 2, 3, 4)


def some_plans(*, pad: bool, count: int) -> list[BatchPlan]:
    """Plans for one replica, of settings that can be split among each of REPLICAS."""
    settings = [
        BatchPlan(
            num_examples=num_examples,
            global_batch_size=batch,
            num_replicas=1,
            num_microbatches=microbatches,
            shuffle_seed=seed,
            drop_remainder=drop,
            pad=pad,
        )
        for num_examples, batch, microbatches, seed, drop in itertools.product(
            (1, 2, 5, 12, 13, 24, 31, 50), (4, 8, 12, 13, 24), (1, 2, 3), (None, 7), (False, True)
        )
        if batch >= microbatches * max(REPLICAS)
        and not (drop and num_examples < batch)
        and not (pad and batch % (microbatches * 12))
    ]
    return random.Random(0).sample(settings, count)


def name(plan: BatchPlan) -> str:
    return "-".join(str(value) for value in dataclasses.astuple(plan))


PLANS = some_plans(pad=False, count=40) + some_plans(pad=True, count=12)
every_plan = pytest.mark.parametrize("plan", PLANS, ids=name)


def pieces(plan: BatchPlan, step: int, replica: int) -> list[list[tuple[int, float]]]:
    """Microbatch by microbatch, a replica's examples with its share in each."""
    held = plan.replica_slice(tf.constant(step, tf.int64), tf.constant(replica, tf.int64))
    order = {"num_examples": plan.num_examples, "seed": plan.shuffle_seed}
    indices = permute(held["positions"], held["epoch"], **order).numpy().tolist()
    shares = held["shares"].numpy().tolist() if "shares" in held else [1.0] * len(indices)
    size = len(indices) // plan.num_turns
    splits = held["splits"].numpy().tolist() if "splits" in held else [*range(0, len(indices) + 1, size)]
    assert plan.width in (None, len(indices))
    assert (plan.num_turns == 1 or plan.width is not None) == ("splits" not in held)
    assert len(splits) == plan.num_turns + 1 and splits[-1] == len(indices) == len(shares)
    rows = list(zip(indices, shares, strict=True))
    return [rows[begin:end] for begin, end in itertools.pairwise(splits)]


def microbatches(plan: BatchPlan, step: int) -> list[dict[int, float]]:
    """Microbatch by microbatch, how much of each example all replicas together have."""
    totals: list[collections.Counter[int]] = [collections.Counter() for _ in range(plan.num_microbatches)]
    for replica in range(plan.num_replicas):
        for total, rows in zip(totals, pieces(plan, step, replica), strict=True):
            for index, share in rows:
                total[index] += share
    return [{index: round(share, 5) for index, share in total.items() if share} for total in totals]


@every_plan
def test_each_example_counts_once_an_epoch_in_the_batches_and_microbatches_of_one_replica(plan: BatchPlan) -> None:
    seen: collections.Counter[int] = collections.Counter()
    for step in range(plan.steps_per_epoch, 2 * plan.steps_per_epoch):
        expected = microbatches(plan, step)
        size = sum(len(held) for held in expected)
        assert size == plan.num_examples_until(step + 1) - plan.num_examples_until(step)
        for num_replicas in REPLICAS[1:]:
            assert microbatches(dataclasses.replace(plan, num_replicas=num_replicas), step) == expected
        for held in expected:
            seen.update(held)
    assert all(share == pytest.approx(1.0, abs=1e-4) for share in seen.values())
    whole = plan.num_examples - (plan.num_examples % plan.global_batch_size if plan.drop_remainder else 0)
    assert len(seen) == whole and set(seen) <= set(range(plan.num_examples))
    assert plan.num_examples_until(2 * plan.steps_per_epoch) == 2 * whole


@every_plan
def test_no_replica_is_without_an_example_and_parts_differ_by_one_at_most_or_not_if_padded(plan: BatchPlan) -> None:
    for num_replicas in REPLICAS:
        plan = dataclasses.replace(plan, num_replicas=num_replicas)
        width = plan.global_batch_size // num_replicas // plan.num_microbatches
        for step in range(plan.steps_per_epoch):
            sizes = [[len(rows) for rows in pieces(plan, step, replica)] for replica in range(num_replicas)]
            assert min(map(min, sizes)) >= 1
            for of_one_microbatch in zip(*sizes, strict=True):
                assert max(of_one_microbatch) - min(of_one_microbatch) <= 1
                assert not plan.pad or set(of_one_microbatch) == {width}


def test_parts_are_the_same_for_any_number_of_replicas() -> None:
    for num_examples, batch, num_parts in ((10, 8, 8), (53, 12, 5), (24, 24, 6), (9, 16, 7)):
        settings = {"num_examples": num_examples, "global_batch_size": batch, "num_parts": num_parts}
        for step in range(BatchPlan(num_replicas=1, **settings).steps_per_epoch):
            parts = {}
            for num_replicas in range(1, num_parts + 1):
                plan = BatchPlan(num_replicas=num_replicas, **settings)
                parts[num_replicas] = [
                    part for replica, span in enumerate(plan.spans) for part in pieces(plan, step, replica)[: len(span)]
                ]
                assert max(map(len, plan.spans)) - min(map(len, plan.spans)) <= 1
                assert [row for part in parts[num_replicas] for row, share in part if share] == [
                    *range(step * batch, min((step + 1) * batch, num_examples))
                ]
                assert parts[num_replicas] == parts[1] and all(parts[1]) and len(parts[1]) == num_parts


test_what_cannot_be_split_is_an_error = each_is_refused(
    lambda settings: BatchPlan(**{"num_examples": 100, "global_batch_size": 16, "num_replicas": 1} | settings),
    ({"global_batch_size": 3, "num_replicas": 4}, "global_batch_size = 3 .*4 replicas.*Write a multiple of 4"),
    ({"global_batch_size": 8, "num_replicas": 4, "num_microbatches": 3}, "4 replicas × 3 microbatches.*of 12"),
    ({"global_batch_size": 10, "num_replicas": 4, "pad": True}, "evenly .*multiple of 4, such as (8|12)"),
    ({"num_examples": 0}, "no examples"),
    ({"num_examples": 15, "drop_remainder": True}, "15 examples, fewer than one batch of 16"),
)
