"""What a plan promises, over many sizes, microbatches, replicas and options."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random

import pytest
import tensorflow as tf
from mistakes import each_is_refused

from tfdist.data.batches import BatchPlan
from tfdist.data.sources.source import permute

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
