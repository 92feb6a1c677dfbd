"""A user's own Dataset: the policy that fits it, the same batches for any workers, positions that can be resumed."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from data_streams import column, global_batches, same

from tfdist.data.pipeline import failures
from tfdist.data.pipeline.pipeline import as_source
from tfdist.data.sources.user_dataset import DatasetFunction, GivenDataset, _global_seed
from tfdist.errors import UserError

EXAMPLES = 29
STEPS = 4  # an epoch of batches of 8, the last with 5


def pair(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cast(i, tf.float32)[tf.newaxis], i


def plain() -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES).map(pair)


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES, seed=3).map(pair)


def by_epoch(epoch: int) -> tf.data.Dataset:
    """Python code that needs a number: NumPy's generator."""
    order = np.random.default_rng(epoch).permutation(EXAMPLES)
    return tf.data.Dataset.from_tensor_slices(order.astype(np.int64)).map(pair).prefetch(2)


def by_seed(seed: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES).shuffle(7, seed=100 + seed).map(pair)


def generated() -> tf.data.Dataset:
    def generate() -> Iterator[tuple[np.ndarray, int]]:
        for i in range(EXAMPLES):
            yield np.array([i], np.float32), i

    signature = (tf.TensorSpec([1], tf.float32), tf.TensorSpec([], tf.int64))
    return tf.data.Dataset.from_generator(generate, output_signature=signature)


def unknown_length() -> tf.data.Dataset:
    return tf.data.Dataset.range(2 * EXAMPLES).filter(lambda i: i % 2 == 0).map(lambda i: pair(i // 2))


@pytest.mark.slow
@pytest.mark.parametrize("function", [plain, shuffled, by_epoch, by_seed, generated, unknown_length])
@pytest.mark.parametrize(("num_workers", "num_local"), [(3, 1), (2, 2)])
def test_each_example_once_an_epoch_in_the_same_batches_for_any_workers(
    function: Callable[..., tf.data.Dataset], num_workers: int, num_local: int
) -> None:
    def make() -> DatasetFunction:
        return DatasetFunction(function)

    workers = {"num_workers": num_workers, "num_local": num_local}
    expected = global_batches(make, steps=3 * STEPS)
    found = global_batches(make, steps=3 * STEPS, **workers)
    assert same(found, expected)
    epochs = [column(found[begin : begin + STEPS], 1).tolist() for begin in range(0, 3 * STEPS, STEPS)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(EXAMPLES))
    reshuffles = function in (shuffled, by_epoch, by_seed)
    assert len(set(map(tuple, epochs))) == (3 if reshuffles else 1)
    for first in (1, STEPS + 2):
        assert same(global_batches(make, steps=3, first_step=first, **workers), expected[first : first + 3])


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
def test_files_are_shared_out_when_there_are_enough(shards: list[str]) -> None:
    def read() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(shards).interleave(tf.data.TFRecordDataset).map(parse)

    for function in (read, lambda: tf.data.TFRecordDataset(shards).map(parse)):
        source = DatasetFunction(function, num_examples=32)
        assert source.policy(4, trains=True)[0] == "file"
        assert "depend on the number of workers" in source.policy(4, trains=True)[1]
        assert source.policy(5, trains=True)[0] == source.policy(1, trains=True)[0] == "data"
        assert source.policy(4, trains=False)[0] == "data"  # an evaluation counts each example once
        batches = global_batches(lambda source=source: source, steps=8, num_workers=4)
        for epoch in (batches[:4], batches[4:]):
            assert sorted(column(epoch, 1)) == list(range(32))
        for batch in batches:  # two from each worker, out of its own file
            assert (batch[1] // 8).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        resumed = global_batches(lambda source=source: source, steps=2, first_step=5, num_workers=4)
        assert same(resumed, batches[5:7])


@pytest.mark.slow
def test_the_policy_follows_from_what_it_is_built_of(shards: list[str]) -> None:
    def policy(dataset: Callable[[], tf.data.Dataset], workers: int = 2) -> str:
        return DatasetFunction(dataset, num_examples=8).policy(workers, trains=True)[0]

    assert policy(plain) == policy(shuffled) == policy(generated) == "data"
    assert policy(lambda: plain().shard(2, 0)) == "off"
    made_before = tf.data.Dataset.range(9).shuffle(9).map(pair)
    assert policy(lambda: made_before) == "off"
    assert policy(lambda: tf.data.Dataset.range(9).shuffle(9).map(pair)) == "data"  # takes the run's seed
    assert policy(lambda: plain().map(lambda x, y: (x + tf.random.uniform([1]), y))) == "data"
    assert policy(lambda: plain().map(lambda x, y: (x + tf.random.uniform([1], seed=4), y))) == "data"
    assert policy(lambda: tf.data.TextLineDataset(shards).map(lambda line: (line, line))) == "file"
    assert (
        policy(lambda: tf.data.Dataset.list_files(shards, seed=1).flat_map(tf.data.TFRecordDataset).map(parse))
        == "file"
    )
    assert DatasetFunction(plain, policy="off").policy(2, trains=True) == ("off", "policy 'off', as it was set")


def test_files_that_do_not_suffice_are_refused_in_training_and_in_evaluation(shards: list[str]) -> None:
    source = DatasetFunction(lambda: tf.data.TFRecordDataset(shards).map(parse), num_examples=32, policy="file")
    for trains in (True, False):
        with pytest.raises(UserError, match=r"gives each of 5 workers files of its own, but the dataset reads 4"):
            source.policy(5, trains=trains)
    assert source.policy(4, trains=True)[0] == "file"
    assert source.policy(4, trains=False)[0] == "data"


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
    assert "Dataset.shuffle has no seed and takes the run's" in source.describe()[0]


def test_an_unseeded_shuffle_that_is_made_already_cannot_be_shared_out() -> None:
    tf.random.set_seed(None)
    made = unseeded()
    tf.random.set_seed(5)
    with pytest.raises(UserError, match=r"Dataset.shuffle of the dataset draws without a seed, so 2 workers"):
        source = GivenDataset(made)
        source._policy = "data"
        global_batches(lambda: source, steps=1, num_workers=2)
    assert "does not resume exactly" in GivenDataset(made).describe()[0]


def test_what_a_source_tells_of_resuming() -> None:
    assert "resumes by skipping in the epoch" in DatasetFunction(plain).describe()[0]
    assert "from the first epoch on" in DatasetFunction(shuffled).describe()[0]
    assert "made anew each epoch with its epoch;" in DatasetFunction(by_epoch).describe()[0]


def test_a_dataset_that_a_data_function_returns_is_taken_as_it_is() -> None:
    source = as_source(plain())
    assert source.num_examples == EXAMPLES
    assert sorted(column(global_batches(lambda: source, steps=STEPS), 1)) == list(range(EXAMPLES))
    again = as_source(shuffled(), shuffled)
    assert same(global_batches(lambda: again, steps=STEPS), global_batches(lambda: again, steps=STEPS))


def test_batches_are_recognized_and_taken_apart_when_asked() -> None:
    def batched() -> tf.data.Dataset:
        return plain().batch(4).prefetch(1)

    with pytest.raises(UserError, match=r"gives batches.*Take out Dataset.batch, or set DatasetFunction.unbatch"):
        DatasetFunction(batched)
    found = global_batches(lambda: DatasetFunction(batched, unbatch=True), steps=STEPS)
    assert same(found, global_batches(lambda: DatasetFunction(plain), steps=STEPS))


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        (lambda: (1, 2), {}, "returns a tf.data.Dataset; received tuple"),
        (lambda: tf.data.Dataset.range(3), {}, r"gives \(x, y\)"),
        (plain, {"policy": "fil"}, "Did you mean 'file'"),
        (plain, {"num_examples": 0}, "num_examples is a whole number"),
        (lambda: plain().ragged_batch(2), {}, "unbatch = True"),
    ],
)
def test_mistakes_have_messages(function: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DatasetFunction(function, **settings)


@pytest.mark.slow
def test_fewer_examples_than_said_end_the_stream_with_an_error() -> None:
    with pytest.raises(tf.errors.FailedPreconditionError) as raised:
        global_batches(lambda: DatasetFunction(plain, num_examples=40), steps=5)
    assert "has only 29 examples, and 40 are expected" in str(failures.explained(raised.value))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "later"), [(40, 60), (60, 40)])
@pytest.mark.parametrize("knows", [True, False])
def test_epochs_of_other_lengths_than_the_first_are_refused(first: int, later: int, knows: bool) -> None:
    def make(epoch: int) -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(later if epoch else first).map(pair)
        return dataset if knows else dataset.filter(lambda x, i: i >= 0)

    failures.forget()
    with pytest.raises(tf.errors.OpError) as raised:
        global_batches(lambda: DatasetFunction(make), steps=3 * first // 8)
    told = str(failures.take() or failures.explained(raised.value))
    assert (f"epoch 1 has {later} examples" if knows else f"and {first} are expected") in told
    assert global_batches(lambda: DatasetFunction(make, num_examples=40), steps=3)


@pytest.mark.slow
def test_the_policy_that_is_told_is_the_one_that_is_used(shards: list[str]) -> None:
    source = DatasetFunction(lambda: tf.data.TFRecordDataset(shards).map(parse), num_examples=32)
    assert source.describe_sharing(1, trains=True).startswith("policy 'data'")
    assert source.describe_sharing(2, trains=False).startswith("policy 'data'")
    told = source.describe_sharing(2, trains=True)
    assert told.startswith("policy 'file'") and "come more than once and others not at all" in told
    assert source.describe_sharing(None, trains=True).endswith(f"With several workers {told}")


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
    with restored_seed():
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


@contextlib.contextmanager
def restored_seed() -> Iterator[None]:
    before, _ = tf.compat.v1.get_seed(None)
    yield
    tf.random.set_seed(before)
