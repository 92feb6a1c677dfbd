"""Anything with `__len__` and `__getitem__`: one order for any workers, resumed anywhere, in threads and processes."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import support
import tensorflow as tf
from data_streams import TOPOLOGIES, column, global_batches, same

from tfdist.data.pipeline import failures
from tfdist.data.pipeline.pipeline import as_source
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.indexed import IndexedSource
from tfdist.errors import UserError

EXAMPLES = 29
STEPS = 4  # an epoch of batches of 8, the last with 5
COLUMNS = Columns(inputs="x", targets="y")


class Squares:
    """As data sets for torch are written."""

    def __init__(self, count: int = EXAMPLES, fails_at: int | None = None, odd_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at
        self.odd_at = odd_at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        if number == self.fails_at:
            raise KeyError(f"no file for {number}")
        return np.full(3 if number == self.odd_at else 2, number * number, np.float64), number


class AtOnce(Squares):
    """Gives several examples at a time, and no single one."""

    def __getitem__(self, number: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [Squares.__getitem__(self, number) for number in numbers]


def listed() -> IndexedSource:
    return as_source([(np.full(2, i * i, np.float32), i) for i in range(EXAMPLES)])


def in_dicts() -> IndexedSource:
    examples = [{"x": [float(i * i)] * 2, "y": i, "unused": "é"} for i in range(EXAMPLES)]
    return IndexedSource(examples, columns=COLUMNS)


def of_grain() -> IndexedSource:
    grain = pytest.importorskip("grain")
    return as_source(grain.MapDataset.source(Squares()).map(lambda pair: (pair[0] + 0, pair[1])))


def of_hugging_face() -> IndexedSource:
    datasets = pytest.importorskip("datasets")
    rows = {"x": [[float(i * i)] * 2 for i in range(EXAMPLES)], "y": list(range(EXAMPLES))}
    return IndexedSource(datasets.Dataset.from_dict(rows), columns=COLUMNS)


def of_tfds(directory: pathlib.Path) -> Callable[[], IndexedSource]:
    tfds = pytest.importorskip("tensorflow_datasets")

    class Numbered(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {"x": tfds.features.Tensor(shape=(2,), dtype=np.float32), "y": np.int64}
            return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

        def _split_generators(self, manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for i in range(EXAMPLES):
                yield i, {"x": np.full(2, i * i, np.float32), "y": i}

    builder = Numbered(data_dir=directory, file_format="array_record")
    builder.download_and_prepare()
    # TFDS shuffles as it writes: here the number of an example is not what it holds.
    return lambda: IndexedSource(builder.as_data_source("train"), columns=COLUMNS)


SOURCES: dict[str, Callable[[], IndexedSource]] = {
    "list": listed,
    "dicts": in_dicts,
    "torch_style": lambda: as_source(Squares()),
    "at_once": lambda: as_source(AtOnce()),
    "threads": lambda: IndexedSource(Squares(), num_threads=3),
    "processes": lambda: IndexedSource(Squares(), num_processes=2),
    "grain": of_grain,
    "hugging_face": of_hugging_face,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOURCES, "tfds"])
def test_each_example_once_an_epoch_in_the_same_batches_for_any_workers(name: str, tmp_path: pathlib.Path) -> None:
    make = of_tfds(tmp_path) if name == "tfds" else SOURCES[name]
    expected = global_batches(make, steps=2 * STEPS)
    epochs = [expected[:STEPS], expected[STEPS:]]
    assert not same(*epochs)
    for epoch in epochs:
        assert sorted(column(epoch, 1)) == list(range(EXAMPLES))
        np.testing.assert_array_equal(column(epoch, 0)[:, 0], column(epoch, 1).astype(np.float32) ** 2)
    if name != "tfds":
        assert same(expected, global_batches(listed, steps=2 * STEPS))
    topologies = TOPOLOGIES if name != "processes" else []  # a copy of the data in six more processes
    for num_workers, num_local in topologies:
        workers = {"num_workers": num_workers, "num_local": num_local}
        assert same(global_batches(make, steps=2 * STEPS, **workers), expected)
        assert same(global_batches(make, steps=3, first_step=STEPS + 1, **workers), expected[STEPS + 1 : STEPS + 4])


def test_texts_images_and_nests_keep_their_types() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 3))
    source = as_source([({"image": image, "text": "é", "flag": True}, np.float64(0.5))])
    found, target = source.structure
    assert found["image"] == tf.TensorSpec([None, 3, 4, 3], tf.uint8)
    assert found["text"].dtype == tf.string and found["flag"].dtype == tf.bool
    assert target == tf.TensorSpec([None], tf.float32)
    (batch,) = global_batches(lambda: source, steps=1, batch_size=1)
    assert [array.dtype for array in batch[:3]] == [bool, np.uint8, object] and batch[2][0] == "é".encode()


def test_a_transform_is_given_batches() -> None:
    source = IndexedSource(Squares(), transform=lambda nest: (nest[0] / 2, nest[1]))
    (batch,) = global_batches(lambda: source, steps=1)
    np.testing.assert_array_equal(batch[0][:, 0], batch[1] ** 2 / 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_source(Squares(0)), "Squares holds no examples"),
        (lambda: as_source(Squares(fails_at=0)), r"Squares\[0\] failed: KeyError: 'no file for 0'"),
        (lambda: IndexedSource(7), "IndexedSource.data is an object with __len__ and __getitem__.*received int"),
        (lambda: IndexedSource(Squares(), columns=COLUMNS), "chooses among the keys of a dict.*Leave columns out"),
        (lambda: IndexedSource([{"x": 1}], columns=COLUMNS), "has no column 'y'; it has .'x'."),
        (lambda: IndexedSource([{"x": 1}], transforms={"x": abs}), "needs IndexedSource.columns"),
        (lambda: IndexedSource(Squares(), num_threads=-1), "num_threads is -1"),
        (lambda: IndexedSource(Squares(), num_threads=1, num_processes=1), "received both"),
        (lambda: as_source([(None, 1)]), "Example 0 is or holds None"),
        (lambda: as_source([(object(), 1)]), "Example 0 holds a object, which is no array"),
    ],
)
def test_a_mistake_is_one_message(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_source(Squares(fails_at=11)), r"Squares\[.*\] failed: KeyError: 'no file for 11'"),
        (
            lambda: as_source(Squares(odd_at=11)),
            r"Squares\[11\] is \(float32\[3\], int64\[\]\), and Squares\[0\] is \(float32\[2\]",
        ),
        (lambda: IndexedSource(_unpicklable(), num_processes=1), "can be pickled; Local cannot"),
    ],
)
def test_what_fails_while_reading_is_one_message(make: Callable[[], IndexedSource], message: str) -> None:
    with pytest.raises(tf.errors.OpError):
        global_batches(make, steps=STEPS)
    error = failures.take()
    assert isinstance(error, UserError)
    with pytest.raises(UserError, match=message):
        raise error


def _unpicklable() -> Any:
    class Local(Squares):
        pass

    return Local()


PROGRAM = """
import sys, time
from data_streams import global_batches
from data.test_indexed import IndexedSource, Squares
if __name__ == "__main__":
    source = IndexedSource(Squares(), num_processes=2)
    global_batches(lambda: source, steps=2)
    print("read", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_processes_end_with_the_one_that_reads(number: int, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, program],
        env=support.clean_environment() | support.TESTS_PATH | {support.MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline().strip() == "read"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(number)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    finally:
        support.kill_marked(mark)
        process.wait()
