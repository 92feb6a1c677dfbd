"""A user's own Dataset: its policies, what it says of itself, and its mistakes."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from data.every_source import STEPS, pair, shuffled
from data.squares import EXAMPLES
from data_streams import column, global_batches, same
from mistakes import each_is_refused

from tfdist.data.sources import failures
from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.user_dataset import DatasetFunction, _global_seed
from tfdist.errors import UserError


def plain() -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES).map(pair)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"num_microbatches": 2}, {"pad": True}, {"drop_remainder": True}], ids=str)
def test_microbatches_padding_and_dropping_are_the_plans(settings: dict[str, Any]) -> None:
    found = global_batches(lambda: DatasetFunction(plain), steps=6, num_workers=2, **settings)
    arrays = tuple(np.concatenate(list(parts)) for parts in zip(*plain().batch(4).as_numpy_iterator(), strict=True))
    assert same(found, global_batches(lambda: as_source(arrays), steps=6, num_workers=2, seed=None, **settings))


@pytest.mark.slow
def test_an_endless_dataset_needs_the_length_of_an_epoch() -> None:
    def endless() -> tf.data.Dataset:
        return tf.data.Dataset.counter().map(pair)

    def make() -> DatasetFunction:
        return DatasetFunction(endless, num_examples=20)

    found = global_batches(make, steps=6)
    assert [len(batch[1]) for batch in found] == [8, 8, 4] * 2
    assert same(found, global_batches(make, steps=6, num_workers=2))
    assert same(found[4:6], global_batches(make, steps=2, first_step=4))
    with pytest.raises(UserError, match=r"has no end.*num_examples = N"):
        DatasetFunction(endless)


@pytest.fixture
def shards(tmp_path: pathlib.Path) -> list[str]:
    paths = [f"{tmp_path}/{i}.tfrecord" for i in range(4)]
    for i, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for j in range(8):
                writer.write(str(8 * i + j).encode())
    return paths


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return pair(tf.strings.to_number(record, tf.int64))


@pytest.mark.slow
def test_a_function_shares_files_out_by_its_input_context(shards: list[str]) -> None:
    def read(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        paths = tf.data.Dataset.from_tensor_slices(shards)
        own = paths.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return own.interleave(tf.data.TFRecordDataset).map(parse)

    source = DatasetFunction(read, num_examples=32, policy="off")
    batches = global_batches(lambda: source, steps=8, num_workers=4)
    for epoch in (batches[:4], batches[4:]):
        assert sorted(column(epoch, 1)) == list(range(32))
    for batch in batches:  # two from each worker, out of its own file
        assert (batch[1] // 8).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert same(global_batches(lambda: source, steps=2, first_step=5, num_workers=4), batches[5:7])


def test_off_gives_every_worker_its_part_from_its_own_stream() -> None:
    found = global_batches(lambda: DatasetFunction(plain, policy="off"), steps=2, num_workers=2)
    assert [batch[1].tolist() for batch in found] == [[0, 1, 2, 3] * 2, [4, 5, 6, 7] * 2]


def unseeded() -> tf.data.Dataset:
    def jittered(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(i, tf.float32)[tf.newaxis] + 0.1 * tf.random.uniform([1]), i

    return tf.data.Dataset.range(EXAMPLES).shuffle(9).map(jittered)


@pytest.mark.slow
def test_what_draws_without_a_seed_takes_the_runs_for_any_workers_and_whatever_was_read_before() -> None:
    tf.random.set_seed(5)
    source = DatasetFunction(unseeded)
    first = global_batches(lambda: source, steps=2 * STEPS)
    drawn = column(first, 1).tolist()
    assert drawn[:EXAMPLES] != drawn[EXAMPLES:]  # it shuffles again each epoch
    next(iter(unseeded()))  # as a probe does
    assert same(first, global_batches(lambda: source, steps=2 * STEPS))
    assert same(first, global_batches(lambda: DatasetFunction(unseeded), steps=2 * STEPS, num_workers=2))


def test_batches_are_recognized_and_taken_apart_when_asked() -> None:
    def batched() -> tf.data.Dataset:
        return plain().batch(4).prefetch(1)

    with pytest.raises(UserError, match=r"gives batches.*Take out Dataset.batch, or set tfdist.DatasetFunc"):
        DatasetFunction(batched)
    pairs = tf.data.Dataset.zip(tf.data.Dataset.range(8).batch(4), tf.data.Dataset.range(2))
    assert DatasetFunction(lambda: pairs).num_examples == 2
    windows = tf.data.Dataset.range(40).batch(10, drop_remainder=True).map(lambda w: (w, w))
    assert DatasetFunction(lambda: windows, unbatch=False).num_examples == 4
    for alone in (lambda: tf.data.Dataset.range(5), lambda: tf.data.Dataset.from_tensor_slices((np.arange(5),))):
        source = as_source(alone)
        assert len(source.structure) == 1 and column(global_batches(lambda s=source: s, steps=1), 0).max() == 4
    found = global_batches(lambda: DatasetFunction(batched, unbatch=True), steps=STEPS)
    assert same(found, global_batches(lambda: DatasetFunction(plain), steps=STEPS))


test_mistakes_have_messages = each_is_refused(
    lambda function, settings: DatasetFunction(function, **settings),
    (lambda: (1, 2), {}, "returns a tf.data.Dataset; received tuple"),
    (lambda: tf.data.Dataset.range(3).map(lambda i: (i,) * 4), {}, r"gives x, \(x, y\)"),
    (plain, {"policy": "file"}, "write one of 'data', 'off'"),
    (plain, {"num_examples": 0}, "num_examples is 0; write a whole number"),
    (lambda: plain().ragged_batch(2), {}, "unbatch = True"),
)


@pytest.mark.slow
def test_fewer_examples_than_said_end_the_stream_with_an_error() -> None:
    with pytest.raises(tf.errors.FailedPreconditionError) as raised:
        global_batches(lambda: DatasetFunction(plain, num_examples=40), steps=5)
    assert "has only 29 examples, and 40 are expected" in str(failures.explain_error(raised.value))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "later", "knows"), [(40, 60, True), (60, 40, False)])
def test_epochs_of_other_lengths_than_the_first_are_refused(first: int, later: int, knows: bool) -> None:
    def make(epoch: int) -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(later if epoch else first).map(pair)
        return dataset if knows else dataset.filter(lambda x, i: i >= 0)

    with pytest.raises(tf.errors.OpError) as raised:
        global_batches(lambda: DatasetFunction(make), steps=3 * first // 8)
    assert f"and {first} are expected" in str(failures.explain_error(raised.value))
    assert global_batches(lambda: DatasetFunction(make, num_examples=40), steps=3)


@pytest.mark.slow
def test_each_example_comes_once_an_epoch_through_tf_data_service() -> None:
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    workers = [service.WorkerServer(service.WorkerConfig(dispatcher_address=address)) for _ in range(2)]

    def served() -> tf.data.Dataset:
        return shuffled().batch(4).apply(service.distribute("distributed_epoch", dispatcher.target))

    source = DatasetFunction(served, num_examples=EXAMPLES, unbatch=True)
    found = column(global_batches(lambda: source, steps=2 * STEPS), 1)
    assert sorted(found[:EXAMPLES]) == sorted(found[EXAMPLES:]) == list(range(EXAMPLES))
    del workers


def drawn_seeds(count: int = 3) -> list[Any]:
    return [tf.compat.v1.get_seed(None) for _ in range(count)]


def test_a_dataset_made_in_another_thread_leaves_this_ones_global_seed_alone() -> None:
    """As tf.data makes the next epoch's while the main thread traces, or a callback draws."""
    tf.random.set_seed(7)
    expected = drawn_seeds(6)
    tf.random.set_seed(5)
    by_tensorflow = drawn_seeds()
    tf.random.set_seed(7)
    first, inside, seen = drawn_seeds(), threading.Event(), threading.Event()
    elsewhere: list[Any] = []

    def make() -> None:
        with _global_seed(5):
            elsewhere.extend(drawn_seeds())
            inside.set()
            seen.wait(60)

    thread = threading.Thread(target=make)
    thread.start()
    assert inside.wait(60)
    traced = tf.function(lambda: tf.constant(0)).get_concrete_function().graph.seed
    meanwhile = drawn_seeds(2)
    seen.set()
    thread.join()
    assert traced == 7 and first + meanwhile + drawn_seeds(1) == expected
    assert elsewhere == by_tensorflow  # in the thread it is what `tf.random.set_seed` makes it
