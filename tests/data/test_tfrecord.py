"""TFRecord files: only the bytes needed, and one message for whatever is wrong with them."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import support
import tensorflow as tf
from data_streams import global_batches
from mistakes import each_is_refused
from record_files_support import COLUMNS, FEATURES, example, write_numbered, write_records

from tfdist import user_code
from tfdist.data.batches import BatchPlan
from tfdist.data.formats import record_files
from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.data.sources import failures
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.source import Order
from tfdist.errors import UserError
from tfdist.storage import files


def numbered(files: str, **settings: Any) -> TFRecordSource:
    return TFRecordSource(**{"files": files, "features": FEATURES, "columns": COLUMNS} | settings)


def read(source: TFRecordSource) -> Any:
    """The examples in their own order."""
    positions = tf.range(source.num_examples, dtype=tf.int64)
    return source.reader(Order(8, None))(positions, tf.constant(0, tf.int64))


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "sizes"), [(2, [3203]), (8, [900, 100, 1500, 0, 711])])  # 3 or 11 left over
def test_a_worker_reads_its_own_bytes_and_no_others(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, num_workers: int, sizes: list[int]
) -> None:
    pattern = write_numbered(tmp_path, sizes, padding=500)
    total, read_range = sum(os.path.getsize(path) for path in tmp_path.glob("part-*")), files.read_range
    for worker in range(num_workers):
        source = numbered(pattern, block_records=32)
        batches = BatchPlan(source.num_examples, 64, num_workers, shuffle_seed=5)
        read_batch = source.reader(Order(64, 5))
        counted: list[int] = []  # the sizes of what is read of record files from now on
        monkeypatch.setattr(files, "read_range", lambda p, at, n, add=counted.append: add(n) or read_range(p, at, n))
        before = _characters_read()
        for step in range(batches.steps_per_epoch):
            piece = batches.replica_slice(tf.constant(step, tf.int64), tf.constant(worker, tf.int64))
            read_batch(piece["positions"], piece["epoch"])
        seen_by_the_system = _characters_read() - before
        assert 0.5 * total / num_workers <= sum(counted) <= 1.02 * total / num_workers
        assert seen_by_the_system <= 1.02 * total / num_workers + 4096


def _characters_read() -> int:
    """Bytes this process has asked the system for."""
    return int(pathlib.Path("/proc/self/io").read_text().split()[1])


def test_the_index_is_made_once_and_again_when_the_file_changes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    original = record_files._find_records
    monkeypatch.setattr(record_files, "_find_records", lambda v: made.append(v.path) or original(v))
    pattern = write_numbered(tmp_path, [3, 4])
    assert [numbered(pattern).num_examples for _ in range(2)] == [7, 7] and len(made) == 2
    write_records(tmp_path / "part-001", [example(number=n, x=[float(n), 0.0]) for n in range(9)])
    assert numbered(pattern).num_examples == 12 and len(made) == 3


def test_a_cache_that_cannot_be_written_or_read_does_no_harm(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = write_numbered(tmp_path, [6])
    numbered(pattern)
    for entry in (tmp_path / "cache").rglob("*.np*"):
        entry.write_bytes(entry.read_bytes()[:40])
    assert numbered(pattern).num_examples == 6
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert numbered(pattern).num_examples == 6


# What is described


def test_every_kind_of_feature(tmp_path: pathlib.Path) -> None:
    records = [
        example(
            image=np.arange(6, dtype=np.uint8).tobytes(), words=list(range(n)), tags=[n, 4], weight=[0.5, float(n)],
            label=n,
        )
        for n in range(3)
    ]  # fmt: skip
    source = TFRecordSource(
        files=str(write_records(tmp_path / "f", records)),
        features={
            "image": tf.io.FixedLenFeature((), "string"),
            "words": tf.io.VarLenFeature("int64"),
            "tags": tf.io.SparseFeature("tags", "weight", "float32", 5),
            "label": tf.io.FixedLenFeature((), "int64"),
        },
        columns=Columns(inputs=["image", "words", "tags"], targets="label"),
        transforms={
            "image": lambda image: tf.reshape(tf.io.decode_raw(image, tf.uint8), [-1, 2, 3]),
            "label": lambda label: tf.cast(label, tf.int32),
        },
        transform=lambda nest: ({**nest[0], "more": nest[1] + 1}, nest[1]),
    )
    shapes = {name: (spec.shape.as_list(), spec.dtype) for name, spec in source.structure[0].items()}
    assert shapes["image"] == ([None, 2, 3], tf.uint8) and shapes["tags"] == ([None, 5], tf.float32)
    x, y = read(source)
    assert y.dtype == tf.int32 and x["more"].numpy().tolist() == [1, 2, 3]
    assert x["words"].numpy().tolist() == [[0, 0], [0, 0], [0, 1]]
    assert x["tags"].numpy().tolist() == [[0.5, 0, 0, 0, 0.0], [0, 0.5, 0, 0, 1], [0, 0, 0.5, 0, 2]]
    assert x["image"][1].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


# What is wrong


test_wrong_settings_give_one_message = each_is_refused(
    lambda settings, tmp_path: numbered(**{"files": write_numbered(tmp_path, [4])} | settings),
    ({"files": "nowhere/*"}, r"No file matches 'nowhere/\*'"),
    ({"files": []}, r"TFRecordSource\.files is \[\]; write a path"),
    ({"features": {}}, "features is a dict"),
    (
        {"features": {"x": ("fixed", (2,), "float32")}},
        r"is not a feature of tf\.io. Write @tf\.io\.FixedLenFeature",
    ),
    ({"features": {"x": tf.io.FixedLenFeature((2,), "int32")}}, "'int32'; records hold float32, int64, string"),
    ({"features": {**FEATURES, "x": tf.io.FixedLenFeature("a", "float32")}}, "Failed to convert .* to a shape"),
    (
        {"features": {**FEATURES, "y": tf.io.FixedLenFeature((), "int64")}},
        "Record 0 of .*Feature: y .*not be found",
    ),
    ({"features": {**FEATURES, "x": tf.io.FixedLenFeature((3,), "float32")}}, "features: Key: x.* Values size: 2"),
    ({"features": {**FEATURES, "x": tf.io.VarLenFeature("int64")}}, "Key: x.*type: int64, Actual type: float"),
    ({"columns": Columns(inputs="y", targets="number")}, "no column 'y'"),
)


def packed(compression: str) -> Callable[[pathlib.Path], None]:
    def write(path: pathlib.Path) -> None:
        with tf.io.TFRecordWriter(str(path), compression) as writer:
            writer.write(example(number=0, x=[0.0, 0.0]))

    return write


def damaged(change: Callable[[bytes, int], bytes]) -> Callable[[pathlib.Path], None]:
    """Four records, of so many bytes each, whose bytes are changed."""

    def write(path: pathlib.Path) -> None:
        data = write_records(path, [example(number=n, x=[float(n), 0.0]) for n in range(4)]).read_bytes()
        path.write_bytes(change(data, len(data) // 4))

    return write


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


test_a_file_that_cannot_be_indexed_is_one_message = each_is_refused(
    lambda write, tmp_path: (write(tmp_path / "f"), numbered(str(tmp_path / "f"))),
    (packed("GZIP"), r"f is compressed, .* Unpack it once, or read it with tf\.data"),
    (packed("ZLIB"), r"f is compressed, .* Unpack it once, or read it with tf\.data"),
    (lambda path: path.write_text("not a record file at all"), "f is not a TFRecord file"),
    (lambda path: path.touch(), "hold no records"),
    (lambda path: path.mkdir(), "is a directory"),
    (damaged(lambda data, size: data[:-1]), r"Record 3 of .*f is corrupt: it is cut short"),
    (damaged(lambda data, size: data[:-9]), r"Record 3 of .*f is corrupt: it is cut short"),
    (damaged(lambda data, size: flipped(data, 2 * size)), "Record 2 of .*f is corrupt: the checksum of its length"),
)


def test_a_corrupt_record_is_named_by_file_and_number(tmp_path: pathlib.Path) -> None:
    pattern = write_numbered(tmp_path, [4, 6])
    path = tmp_path / "part-001"
    path.write_bytes(flipped(path.read_bytes(), 2 * (path.stat().st_size // 6) + 20))
    source = numbered(pattern)
    with pytest.raises((UserError, tf.errors.OpError)):
        global_batches(lambda: source, steps=3, batch_size=4)
    told = failures.pop_error()
    assert isinstance(told, UserError)
    assert "Record 2 of" in str(told) and "part-001 is corrupt: its checksum is wrong" in str(told)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (example(number=1), "input pipeline failed: .*Feature: x .*is required but could not be found"),
        (b"\xff\xff\xff\xff", "is not a tf.train.Example"),
        (example(number=1, x=[1.0, 2.0], tags=[7], weight=[1.0]), "input pipeline failed: .*indices.*out of bounds"),
    ],
    ids=["no_x", "no_example", "too_large"],  # the bytes differ from run to run
)
def test_a_later_record_that_does_not_fit_is_one_message(tmp_path: pathlib.Path, later: bytes, message: str) -> None:
    path = write_records(tmp_path / "f", [example(number=0, x=[1.0, 2.0], tags=[1], weight=[1.0]), later])
    features = {**FEATURES, "tags": tf.io.SparseFeature("tags", "weight", "float32", 5)}
    source = numbered(str(path), features=features, columns=Columns(inputs=["x", "tags"], targets="number"))
    with pytest.raises((tf.errors.OpError, UnicodeDecodeError)) as caught:
        global_batches(lambda: source, steps=1, batch_size=2)
    assert re.search(message, str(failures.explain_error(caught.value) or user_code.refused_values(caught.value)))


# A process ends while a pipeline is alive


PROGRAM = """
import sys, threading, time
import tensorflow as tf
from tfdist.data.batches import BatchPlan
from tfdist.data.sources.columns import Columns
from tfdist.data.pipeline import build_pipeline
from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.strategies.strategy import Topology

pattern, how = sys.argv[1:]
features = {"number": tf.io.FixedLenFeature((), tf.int64)}
source = TFRecordSource(files=pattern, features=features, columns=Columns(inputs="number", targets="number"),
                        block_records=8)
plan = BatchPlan(num_examples=source.num_examples, global_batch_size=16, num_replicas=1, shuffle_seed=1)
read = source.read_run
reading = threading.Event()

def slow(*args):
    reading.set()
    time.sleep(0.02)
    return read(*args)

source.read_run = slow
iterator = iter(build_pipeline(source, plan, Topology(0, 1, 1)))
if how == "consumed":
    @tf.function(autograph=False)
    def consume(iterator):
        return tf.while_loop(lambda i: True, lambda i: i + tf.size(next(iterator)["examples"][0]), [tf.constant(0)])
    threading.Thread(target=lambda: consume(iterator), daemon=True).start()
else:
    next(iterator)
    reading.clear()
reading.wait()
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at rest", "consumed"])
def test_a_process_ends_with_its_status_while_a_pipeline_is_alive(tmp_path: pathlib.Path, how: str) -> None:
    pattern = write_numbered(tmp_path, [4000, 3000])
    # Without the waiting about half of them hang.
    ended = support.run_python(["-c", PROGRAM, pattern, how], env={"XDG_CACHE_HOME": str(tmp_path)}, timeout=60)
    assert ended.status == 7, ended.outputs()
    assert "terminate called" not in ended.stderr
