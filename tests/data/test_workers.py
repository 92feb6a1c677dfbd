"""Counted over real files and real worker processes: each example once an epoch, in one sequence of global batches.

Whatever the number of workers, the number and size of the files, where a run begins again and with how many workers.
"""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
from collections.abc import Iterable

import pytest
import support
import tensorflow as tf
from data.read_as_worker import BATCH, EPOCHS, middle_of

PROGRAM = pathlib.Path(__file__).with_name("read_as_worker.py")
FILE_SIZES = ([101], [60, 41], [1, 0, 100], [17, 33, 50, 3], [40, 0, 7, 90, 21])
WORKERS = (1, 2, 3, 4)

pytestmark = pytest.mark.slow

Steps = list[list[int]]


def flat(steps: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(steps))


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """Directories of TFRecord files whose records are numbered from 0."""
    made = []
    for sizes in FILE_SIZES:
        directory = tmp_path_factory.mktemp("files")
        numbers = iter(range(sum(sizes)))
        for i, size in enumerate(sizes):
            with tf.io.TFRecordWriter(str(directory / f"part-{i}")) as writer:
                for _ in range(size):
                    number = tf.train.Feature(int64_list=tf.train.Int64List(value=[next(numbers)]))
                    features = tf.train.Features(feature={"number": number})
                    writer.write(tf.train.Example(features=features).SerializeToString())
        made.append(directory)
    return made


@pytest.fixture(scope="module")
def sequences(
    data_sets: list[pathlib.Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, dict[str, Steps]]]:
    """Global batches by number of workers, data set and where the reading began."""
    scratch = tmp_path_factory.mktemp("read")
    found: dict[int, dict[str, dict[str, Steps]]] = {}
    for num_workers in WORKERS:
        parts = []
        for worker in range(num_workers):
            out = scratch / f"{num_workers}-{worker}.json"
            arguments = [PROGRAM, str(worker), str(num_workers), out, *data_sets]
            support.run_python(arguments, env={"XDG_CACHE_HOME": str(scratch)}, timeout=120).check()
            parts.append(json.loads(out.read_text()))
        found[num_workers] = {
            data_set: {
                begin: [flat(step) for step in zip(*(p[data_set][begin] for p in parts), strict=True)]
                for begin in ("start", "middle")
            }
            for data_set in map(str, data_sets)
        }
    return found


def each_data_set(data_sets: list[pathlib.Path]) -> list[tuple[str, int]]:
    return [(str(d), sum(sizes)) for d, sizes in zip(data_sets, FILE_SIZES, strict=True)]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_an_epoch_is_the_data_set(sequences, data_sets, num_workers: int) -> None:
    for data_set, size in each_data_set(data_sets):
        steps = sequences[num_workers][data_set]["start"]
        per_epoch = -(-size // BATCH)
        assert len(steps) == EPOCHS * per_epoch
        for epoch in (steps[:per_epoch], steps[per_epoch:]):
            assert collections.Counter(flat(epoch)) == dict.fromkeys(range(size), 1)


@pytest.mark.parametrize("num_workers", WORKERS[1:])
def test_global_batches_do_not_depend_on_the_number_of_workers(sequences, data_sets, num_workers: int) -> None:
    for data_set, _ in each_data_set(data_sets):
        assert sequences[num_workers][data_set]["start"] == sequences[1][data_set]["start"]


def test_epochs_differ_and_are_shuffled(sequences, data_sets) -> None:
    for data_set, size in each_data_set(data_sets):
        steps = sequences[1][data_set]["start"]
        half = len(steps) // 2
        assert steps[:half] != steps[half:]
        assert flat(steps[:half]) != list(range(size))


@pytest.mark.parametrize("before", WORKERS)
@pytest.mark.parametrize("after", WORKERS)
def test_a_restart_goes_on_with_the_next_example_on_any_number_of_workers(
    sequences, data_sets, before: int, after: int
) -> None:
    for data_set, _ in each_data_set(data_sets):
        whole = sequences[1][data_set]["start"]
        middle = middle_of(data_set, len(whole))
        stitched = sequences[before][data_set]["start"][:middle] + sequences[after][data_set]["middle"]
        assert stitched == whole
