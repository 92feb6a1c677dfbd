"""Mixtures hold their quotas, go through each source once before again, and are the same for any number of workers."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from data.every_source import mixed_images
from data_streams import column, global_batches
from mistakes import each_is_refused

from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.mixture import Mixture, Quotas
from tfdist.data.tables.tables import Table
from tfdist.data.transforms.mapped import FirstExamples
from tfdist.errors import UserError

SIZES = (23, 7, 50)


def numbers(source: int) -> Any:
    """Examples whose x is 1,000 · source + number."""
    rows = np.arange(SIZES[source])
    return (1000 * source + rows).astype(np.float32)[:, np.newaxis], rows.astype(np.int32)


def mixture(weights: Any = (5, 1, 2), **settings: Any) -> Mixture:
    return Mixture([lambda s=s: numbers(s) for s in range(3)], weights=weights, **settings)


def sources_of(batches: Sequence[Any]) -> np.ndarray:
    return (column(batches, 0)[:, 0] // 1000).astype(int)


def test_every_batch_holds_its_quotas_and_every_source_goes_through_its_epochs() -> None:
    batches = global_batches(mixture, steps=40, batch_size=8)
    for batch in batches[:9]:
        assert np.bincount(sources_of([batch]), minlength=3).tolist() == [5, 1, 2]
    drawn = column(batches, 0)[:, 0].astype(int)
    for source, size in enumerate(SIZES):
        own = drawn[drawn // 1000 == source] % 1000
        assert len(own) > size or source == 2
        epochs = [own[begin : begin + size].tolist() for begin in range(0, len(own), size)]
        for epoch in epochs[:-1]:
            assert sorted(epoch) == list(range(size))
        assert len(set(map(tuple, epochs))) == len(epochs)  # another order each time


def test_a_small_source_may_give_a_replica_none_of_an_epoch() -> None:
    def small_and_large() -> Mixture:
        return Mixture([lambda n=n: (np.arange(n, dtype=np.float32), np.arange(n)) for n in (8, 200)], weights=(1, 1))

    alone, shared = (
        global_batches(small_and_large, steps=3, batch_size=64, num_local=n, num_microbatches=n) for n in (1, 2)
    )
    assert [sorted(x) for x, _ in shared] == [sorted(x) for x, _ in alone]


@pytest.mark.slow
def test_weights_change_by_epoch() -> None:
    by_epoch = global_batches(lambda: mixture({0: (1, 0, 0), 2: (0, 1, 1)}, examples_per_epoch=16), steps=8)
    assert set(sources_of(by_epoch[:4])) == {0} and set(sources_of(by_epoch[4:])) == {1, 2}


@pytest.mark.parametrize("weights", [(0.1, 0.2, 0.7), (1, 1e-4, 3), (1 / 3, 2, 0.05), (0, 1, 0)], ids=str)
def test_counts_never_fall_add_up_and_stay_near_the_shares(weights: tuple[float, ...]) -> None:
    quotas = Quotas((0, 1000), (weights, tuple(reversed(weights))))
    places = np.concatenate([np.arange(3000), np.arange(3000) + 10**12])
    counts = quotas.counts(tf.constant(places)).numpy()
    np.testing.assert_array_equal(counts.sum(axis=1), places)
    steps = np.diff(counts[:3000], axis=0)
    assert steps.min() >= 0
    share = np.array(weights) / sum(weights)
    assert np.abs(counts[:1000] - np.outer(places[:1000], share)).max() < 3


@pytest.mark.slow
def test_images_of_a_mixture_are_augmented(tmp_path: pathlib.Path) -> None:
    batches = global_batches(mixed_images(tmp_path), steps=6)
    levels = column(batches, 0)[column(batches, 1) < 99][:, 0, 0, 0] * 255
    assert not np.allclose(levels % 1, 0, atol=0.01)


def test_tables_of_a_mixture_take_what_was_fitted_for_the_run(tmp_path: pathlib.Path) -> None:
    files = [str(tmp_path / f"{name}.csv") for name in "ab"]

    def write(*kinds: str) -> None:
        for path in files:
            pathlib.Path(path).write_text("kind,y\n" + "".join(f"{kind},1\n" for kind in kinds))

    def kinds_read() -> list[int]:
        made = Mixture([Table(files=each, fitted_on=files, columns=Columns("kind", "y")) for each in files])
        made.prepare(str(tmp_path / "fitted"))
        return column(global_batches(lambda: made, steps=1, batch_size=4), 0).ravel().tolist()

    write("mmm", "zzz")
    assert sorted(kinds_read()) == [0, 0, 1, 1]
    write("mmm", "zzz", "aaa")  # of which no start of this run may make the first
    with pytest.raises(UserError, match="'kind' is 'aaa', which is not among its 2 values"):
        kinds_read()


ONE: dict[str, Any] = {"sources": [lambda: numbers(0)]}
test_mistakes_have_messages = each_is_refused(
    lambda settings: global_batches(lambda: Mixture(**settings), steps=1),
    ({"sources": []}, "a list of data functions"),
    ({**ONE, "weights": (1, 2)}, r"1 numbers from 0 on.*received \(1, 2\)"),
    ({**ONE, "weights": (-1,)}, "from 0 on"),
    ({**ONE, "weights": (0,)}, "not all 0"),
    ({**ONE, "weights": {1: (1,)}}, "begins with an entry for 0"),
    ({**ONE, "weights": {0: (1,), 0.5: (1,)}}, "begins with an entry for 0"),
    ({**ONE, "examples_per_epoch": 0}, "examples_per_epoch is 0; write a whole number"),
    ({"sources": [lambda: numbers(0), lambda: (np.zeros((3, 2)), np.zeros(3))]}, "must look alike.*source 1"),
    ({"sources": [lambda: None]}, "returned NoneType"),
    ({"sources": [lambda: tf.data.Dataset.range(4).map(lambda i: (i, i))] * 2}, "cannot be part of a mixture"),
)


def test_what_workers_compare_of_files_passes_through() -> None:
    source = as_source(lambda: numbers(0))
    source.file_sizes, source.has_same_batches = (20, 3), False
    first = FirstExamples(source, 5)
    assert (first.file_sizes, first.has_same_batches) == ((20, 3), False)
    assert Mixture([source, first]).file_sizes == (20, 3, 20, 3)
