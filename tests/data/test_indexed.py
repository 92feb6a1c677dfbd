"""Anything with `__len__` and `__getitem__`: its types, its mistakes, and processes that end with the run."""

from __future__ import annotations

import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import support
import tensorflow as tf
from data.every_source import STEPS, XY
from data.squares import Squares
from data_streams import global_batches
from mistakes import call, each_is_refused
from processes import Running

from tfdist.data.sources import failures
from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.indexed import IndexedSource
from tfdist.errors import UserError


def test_texts_images_and_nests_keep_their_types() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 3))
    source = as_source([({"image": image, "text": "é", "flag": True}, np.float64(0.5))])
    found, target = source.structure
    assert found["image"] == tf.TensorSpec([None, 3, 4, 3], tf.uint8)
    assert found["text"].dtype == tf.string and found["flag"].dtype == tf.bool
    assert target == tf.TensorSpec([None], tf.float32)
    (batch,) = global_batches(lambda: source, steps=1, batch_size=1)
    assert [array.dtype for array in batch[:3]] == [bool, np.uint8, object] and batch[2][0] == "é".encode()


def test_columns_that_are_not_used_may_hold_anything() -> None:
    examples = [{"x": float(i), "y": i, "none": None, "ragged": [0] * i} for i in range(4)]
    ((x, y),) = global_batches(lambda: IndexedSource(examples, columns=XY), steps=1, batch_size=4, seed=None)
    assert x.tolist() == y.tolist() == [0, 1, 2, 3]


def test_examples_may_be_arrays_without_targets() -> None:
    source = IndexedSource([np.full(2, i, np.int32) for i in range(3)])
    ((x,),) = global_batches(lambda: source, steps=1, batch_size=3, seed=None)
    assert x.tolist() == [[0, 0], [1, 1], [2, 2]]


test_a_mistake_is_one_message = each_is_refused(
    call,
    (lambda: as_source(Squares(0)), "Squares holds no examples"),
    (lambda: as_source(Squares(fails_at=0)), r"Squares\[0\] failed: KeyError: 'no file for 0'"),
    (lambda: IndexedSource(7), "IndexedSource.data is an object with __len__ and __getitem__.*received int"),
    (lambda: IndexedSource(Squares(), columns=XY), "chooses among the keys of a dict.*Leave columns out"),
    (lambda: IndexedSource([{"x": 1}], columns=XY), "has no column 'y'; it has .'x'."),
    (lambda: IndexedSource([{"x": 1}], transforms={"x": abs}), "needs IndexedSource.columns"),
    (lambda: IndexedSource(Squares(), num_threads=-1), "num_threads is -1"),
    (lambda: IndexedSource(Squares(), num_threads=1, num_processes=1), "received both"),
    (lambda: as_source([(None, 1)]), "Example 0 is or holds None"),
    (lambda: as_source([(object(), 1)]), "Example 0 holds a object, which is no array"),
)


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
    error = failures.pop_error()
    assert isinstance(error, UserError)
    with pytest.raises(UserError, match=message):
        raise error


def _unpicklable() -> Any:
    class Local(Squares):
        pass

    return Local()


PROGRAM = """
if __name__ == "__main__":
    import time
    from data_streams import global_batches
    from data.squares import Squares
    from tfdist.data.sources.indexed import IndexedSource
    source = IndexedSource(Squares(), num_processes=2)
    global_batches(lambda: source, steps=2)
    print("read", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_processes_end_with_the_one_that_reads(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Running([sys.executable, program], tmp_path / "log", support.TESTS_PATH) as process:
        process.until(lambda: "read\n" in process.output)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.signal(signal.SIGKILL)
        process.end()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
